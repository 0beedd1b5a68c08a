"""What policy losses take and return."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_core.algorithms.masking import masked
from slime_core.errors import ConfigError


@dataclass(frozen=True)
class PolicyInputs:
    """P tokens of k rows. Whatever stood outside the mask is 0 after construction.

    Attributes:
        log_probs: [P] of the policy being trained, with gradient.
        old_log_probs: [P] of the policy the ratio refers to, no gradient.
        advantages: [P], no gradient.
        mask: bool [P], trained tokens.
        rows: int64 [P] in 0..k-1.
        num_rows: k.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    rows: Tensor
    num_rows: int

    def __post_init__(self) -> None:
        if self.mask.dtype != torch.bool:
            raise TypeError(f"PolicyInputs.mask must be a bool tensor, got {self.mask.dtype}")
        for name in ("log_probs", "old_log_probs", "advantages"):
            value = getattr(self, name)
            if value.shape != self.mask.shape:
                raise ValueError(
                    f"PolicyInputs.{name} has shape {tuple(value.shape)}, "
                    f"the mask {tuple(self.mask.shape)}"
                )
            clean = masked(value, self.mask)
            object.__setattr__(self, name, clean if name == "log_probs" else clean.detach())

    @property
    def log_ratio(self) -> Tensor:
        """[P] current minus old; 0 outside the mask."""
        return self.log_probs - self.old_log_probs


@dataclass(frozen=True)
class PolicyOptions:
    """Numbers of the policy losses, under the names of their flags.

    Attributes:
        eps_clip: lower bound of the ratio is 1 - eps_clip.
        eps_clip_high: upper bound is 1 + eps_clip_high; None takes eps_clip.
        eps_clip_c: dual clip, bounds the loss of negative advantages by c * |A|; > 1 or None.
        sapo_tau_pos: SAPO temperature for positive advantages.
        sapo_tau_neg: SAPO temperature for the others.
        ipo_threshold: IPO leaves out tokens whose probability moved further.
        ipo_kl_tau: weight of IPO's squared log-ratio.
    """

    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    ipo_threshold: float = 0.1
    ipo_kl_tau: float = 1e-3

    def __post_init__(self) -> None:
        if self.eps_clip < 0 or self.high < 0:
            raise ConfigError(
                f"--eps-clip {self.eps_clip} and --eps-clip-high {self.high} must not be negative"
            )
        if self.eps_clip_c is not None and self.eps_clip_c <= 1:
            raise ConfigError(f"--eps-clip-c must be above 1, got {self.eps_clip_c}")
        if self.sapo_tau_pos <= 0 or self.sapo_tau_neg <= 0:
            raise ConfigError(
                f"SAPO temperatures must be positive, got {self.sapo_tau_pos} and "
                f"{self.sapo_tau_neg}"
            )

    @property
    def high(self) -> float:
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high


@dataclass(frozen=True)
class TokenLoss:
    """values: [P] loss of each token, with gradient. metrics: name -> [P], no gradient.

    Both are reduced by `reductions`; what stands outside the mask does not matter.
    """

    values: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
