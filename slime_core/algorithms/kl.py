"""KL between the policy and another one (reference, teacher), token by token from log-probs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from slime_core.algorithms.advantages.registry import unknown_name
from slime_core.algorithms.masking import bounded_exp, k3_divergence, masked
from slime_core.errors import ConfigError

KLType = Literal["k1", "k2", "k3", "low_var_kl", "abs"]
KL_TYPES: tuple[str, ...] = ("k1", "k2", "k3", "low_var_kl", "abs")
LOW_VAR_BOUND = 10.0


def kl_estimate(
    log_probs: Tensor,
    other_log_probs: Tensor,
    mask: Tensor,
    kind: KLType,
    importance_ratio: Tensor | None = None,
) -> Tensor:
    """Estimates KL(policy || other) on tokens sampled from the policy.

    With d = log p - log p_other: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, low_var_kl = k3
    clamped to +-10, abs = |d|. Schulman 2020, "Approximating KL divergence"
    (joschu.net/blog/kl-approx.html).

    Args:
        log_probs: [P], with gradient where it is a loss.
        other_log_probs: [P]
        mask: bool [P]; other positions give 0.
        kind: one of KL_TYPES.
        importance_ratio: [P] policy / sampling policy. Multiplying by it makes the gradient that
            of the KL also off policy (`--use-unbiased-kl`, DeepSeek-V3.2, arXiv:2512.02556); the
            ratio keeps its gradient. See `unbiased_ratio`.

    Returns:
        [P]
    """
    d = masked(log_probs, mask) - masked(other_log_probs, mask)
    if kind == "k1":
        kl = d
    elif kind == "k2":
        kl = d**2 / 2
    elif kind in ("k3", "low_var_kl"):
        kl = k3_divergence(-d)
    elif kind == "abs":
        kl = d.abs()
    else:
        raise ConfigError(unknown_name("--kl-loss-type", kind, list(KL_TYPES)))
    if importance_ratio is not None:
        kl = masked(importance_ratio, mask, fill=1.0) * kl
    return kl.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var_kl" else kl


def unbiased_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """exp(log p - log p_old), 1 outside the mask; gradient through log_probs. [P]"""
    return bounded_exp(masked(log_probs, mask) - masked(old_log_probs, mask).detach())


@dataclass(frozen=True)
class KLCoefficient:
    """A KL coefficient that follows a target; with target None it stays as it is.

    Ziegler et al. 2019, arXiv:1909.08593.

    Attributes:
        value: the coefficient in use.
        target: wanted KL a token (nats), or None.
        horizon: samples over which it adapts.
    """

    value: float
    target: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        if self.value < 0 or self.horizon < 1 or (self.target is not None and self.target <= 0):
            raise ConfigError(
                f"KL coefficient {self.value} must not be negative, target {self.target} and "
                f"horizon {self.horizon} must be positive"
            )

    def after(self, kl: float, samples: int) -> KLCoefficient:
        """The coefficient after a batch: value * (1 + clip(kl / target - 1, +-0.2) n / horizon).

        Args:
            kl: mean KL a token of the batch.
            samples: n, samples of the batch.
        """
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, value=self.value * (1 + error * samples / self.horizon))
