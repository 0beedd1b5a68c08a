"""Weights and masks for samples that another policy generated: stale or numerically different.

The log-ratio is log p_train - log p_rollout, where p_train is the trainer's recomputation of the
policy the PPO ratio refers to. Weights multiply token losses; they have no gradient, and tokens
they drop stay in every denominator, so a correction never raises the weight of what remains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slime_core.algorithms.masking import bounded_exp, k3_divergence, masked, row_means, row_sums
from slime_core.errors import ConfigError

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["none", "truncate", "clip", "mask"]


@dataclass(frozen=True)
class Tokens:
    """Log-ratios of P tokens of k rows; 0 outside the mask after construction.

    Attributes:
        log_ratio: [P] log p_train - log p_rollout.
        mask: bool [P]
        rows: int64 [P] in 0..k-1.
        num_rows: k.
    """

    log_ratio: Tensor
    mask: Tensor
    rows: Tensor
    num_rows: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "log_ratio", masked(self.log_ratio.detach(), self.mask))

    @classmethod
    def of(
        cls, train: Tensor, rollout: Tensor, mask: Tensor, rows: Tensor, num_rows: int
    ) -> Tokens:
        """From log-probs [P] of trainer and engine."""
        return cls(masked(train, mask) - masked(rollout, mask), mask, rows, num_rows)

    def at(self, level: Level) -> Tensor:
        """[P]: the token's log-ratio, or the sum or mean over its row's trained tokens."""
        if level == "token":
            return self.log_ratio
        if level == "sequence":
            return row_sums(self.log_ratio, self.rows, self.num_rows)[self.rows]
        if level == "geometric":
            return row_means(self.log_ratio, self.mask, self.rows, self.num_rows)[self.rows]
        raise ConfigError(f"unknown level {level!r}: use token, sequence or geometric")


@dataclass(frozen=True)
class Correction:
    """weights: [P], 0 outside the mask. metrics: name -> [P], reduced like a loss."""

    weights: Tensor
    metrics: dict[str, Tensor]


def importance_weights(
    tokens: Tokens,
    *,
    level: Level = "token",
    mode: Mode = "clip",
    low: float = 0.0,
    high: float = 2.0,
) -> Correction:
    """Bounded importance weights w = p_train / p_rollout.

    mode truncate: min(w, high). clip: w clamped to [low, high]. mask: w inside the bounds, else
    0. none: w.

    TIS is truncate or clip (Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"): `--tis-clip` is high, `--tis-clip-low` is low. IcePop is level token
    with mode mask (Ling team 2025, arXiv:2510.18855). MIS is any level with any mode.

    Args:
        tokens: log-ratios.
        level: token, sequence (product of the row's ratios) or geometric (their mean).
        mode: how bounds are applied.
        low, high: bounds, 0 <= low <= high.

    Returns:
        Weights; metrics ois (unbounded weight), tis (bounded weight), tis_clipfrac (tokens the
        bounds changed) and tis_abs (|unbounded - 1|).
    """
    if not 0 <= low <= high:
        raise ConfigError(f"importance weights need 0 <= low <= high, got {low} and {high}")
    ratio = bounded_exp(tokens.at(level))
    if mode == "none":
        bounded = ratio
    elif mode == "truncate":
        bounded = ratio.clamp(max=high)
    elif mode == "clip":
        bounded = ratio.clamp(low, high)
    elif mode == "mask":
        bounded = masked(ratio, (ratio >= low) & (ratio <= high))
    else:
        raise ConfigError(f"unknown mode {mode!r}: use none, truncate, clip or mask")
    weights = masked(bounded, tokens.mask)
    changed = (bounded != ratio).to(ratio.dtype)
    metrics = {"ois": ratio, "tis": bounded, "tis_clipfrac": changed, "tis_abs": (ratio - 1).abs()}
    return Correction(weights, metrics)


def weight_scale(weights: Tensor, mask: Tensor) -> Tensor:
    """What to multiply weights by so that their mean over trained tokens is 1; 1 if all are 0.

    Args:
        weights: [P] of all tokens of an optimizer step, on all ranks.
        mask: bool [P]

    Returns:
        float64 scalar.
    """
    total = masked(weights.double(), mask).sum()
    return torch.where(total > 0, mask.sum() / total, torch.ones_like(total))


@dataclass(frozen=True)
class Rejection:
    """A bound on how far a token or its row may be from the sampling policy.

    Attributes:
        scope: token, or the row's seq_sum, seq_mean or seq_max; a row is kept or dropped whole.
        estimator: k1 compares the ratio exp(log-ratio), k2 = log-ratio^2 / 2 and
            k3 = ratio - 1 - log-ratio the divergence.
        high: upper bound.
        low: lower bound, for k1 only; None takes 1 / high.
    """

    scope: Literal["token", "seq_sum", "seq_mean", "seq_max"]
    estimator: Literal["k1", "k2", "k3"]
    high: float
    low: float | None = None

    def __post_init__(self) -> None:
        if self.scope not in ("token", "seq_sum", "seq_mean", "seq_max"):
            raise ConfigError(f"unknown rejection scope {self.scope!r}")
        if self.estimator not in ("k1", "k2", "k3"):
            raise ConfigError(f"unknown rejection estimator {self.estimator!r}: k1, k2 or k3")
        if self.high <= 0 or (self.low is not None and not 0 <= self.low <= self.high):
            raise ConfigError(f"rejection bounds need 0 <= low <= high, got {self}")
        if self.scope == "seq_max" and self.estimator == "k1":
            raise ConfigError("rejection by seq_max needs k2 or k3: a ratio has two far sides")
        if self.low is not None and self.estimator != "k1":
            raise ConfigError(f"rejection by {self.estimator} has no lower bound: it is never < 0")


def rejection_mask(tokens: Tokens, rejection: Rejection) -> Tensor:
    """bool [P]: trained tokens that stay."""
    lr = tokens.log_ratio
    if rejection.estimator == "k1":
        divergence = lr
    elif rejection.estimator == "k2":
        divergence = lr**2 / 2
    else:
        divergence = k3_divergence(lr)
    rows, n = tokens.rows, tokens.num_rows
    if rejection.scope == "seq_sum":
        divergence = row_sums(divergence, rows, n)[rows]
    elif rejection.scope == "seq_mean":
        divergence = row_means(divergence, tokens.mask, rows, n)[rows]
    elif rejection.scope == "seq_max":
        largest = divergence.new_zeros(n).scatter_reduce(0, rows, divergence, "amax")
        divergence = largest[rows]
    if rejection.estimator != "k1":
        return tokens.mask & (divergence <= rejection.high)
    low = 1 / rejection.high if rejection.low is None else rejection.low
    ratio = bounded_exp(divergence)
    return tokens.mask & (ratio >= low) & (ratio <= rejection.high)


def veto_mask(tokens: Tokens, threshold: float) -> Tensor:
    """bool [P]: trained tokens of rows in which no token's ratio is below the threshold."""
    below = tokens.mask & (bounded_exp(tokens.log_ratio) < threshold)
    return _whole_rows(tokens.mask, below, tokens.rows, tokens.num_rows)


def opsm_mask(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    delta: float,
) -> Tensor:
    """Off-policy sequence masking: drops whole rows that are both bad and far from the policy.

    A row is dropped if its mean advantage is below 0 and its mean of log p_old - log p exceeds
    delta. DeepSeek-V3.2, arXiv:2512.02556.

    Returns:
        bool [P]: trained tokens that stay.
    """
    gap = masked(old_log_probs, mask) - masked(log_probs.detach(), mask)
    far = row_means(gap, mask, rows, num_rows) > delta
    bad = row_means(advantages, mask, rows, num_rows) < 0
    return mask & ~(far & bad)[rows]


def reject(
    tokens: Tokens,
    weights: Callable[[Tokens], Correction] | None = None,
    rejection: Rejection | None = None,
    veto: float | None = None,
) -> Correction:
    """Importance weights (1 without any), 0 where a token or its row is rejected.

    Args:
        tokens: log-ratios.
        weights: for example `partial(importance_weights, high=2.0)`.
        rejection: bounds on the ratio.
        veto: rows with a token whose ratio is below it are rejected.

    Returns:
        Weights; the metrics of `weights` and rs_rejected (1 where a token is rejected).
    """
    correction = Correction(tokens.mask.to(tokens.log_ratio.dtype), {})
    if weights is not None:
        correction = weights(tokens)
    kept = tokens.mask
    if rejection is not None:
        kept = kept & rejection_mask(tokens, rejection)
    if veto is not None:
        kept = kept & veto_mask(tokens, veto)
    rejected = (tokens.mask & ~kept).to(tokens.log_ratio.dtype)
    return Correction(
        masked(correction.weights, kept), {**correction.metrics, "rs_rejected": rejected}
    )


def _whole_rows(mask: Tensor, offending: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    hit = row_sums(offending.long(), rows, num_rows) > 0
    return mask & ~hit[rows]
