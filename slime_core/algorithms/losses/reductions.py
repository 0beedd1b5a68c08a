"""From token values to one number, by weights that do not know micro-batches or ranks.

A step's loss is sum over all its tokens of weight * value. Weights contain global counts only
(`batching.select.step_totals`), so the sum may be cut into micro-batches and ranks in any way.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from slime_core.algorithms.masking import masked
from slime_core.errors import ConfigError

ReductionMode = Literal["sample_mean", "token_mean", "constant_length"]


def token_weights(
    mode: ReductionMode,
    rows: Tensor,
    denominators: Tensor,
    *,
    rollouts: int,
    tokens: int,
    constant_length: int | None = None,
) -> Tensor:
    """The weight of each token in the step's loss.

    sample_mean: 1 / (denominator of the token's rollout * rollouts): the mean over rollouts of
    each one's token mean. Fanned-out siblings share a denominator and count once; a rollout
    without a trained token counts as 0.
    token_mean: 1 / tokens (DAPO, arXiv:2503.14476; `--calculate-per-token-loss`).
    constant_length: 1 / (constant_length * rollouts) (Dr.GRPO, arXiv:2503.20783).

    Args:
        mode: one of the three.
        rows: int64 [P], the row of each token.
        denominators: [k], trained tokens of the whole rollout of each row.
        rollouts: rollouts of the step over all ranks and micro-batches.
        tokens: trained tokens of the step over all ranks and micro-batches.
        constant_length: tokens; needed for that mode only.

    Returns:
        [P] in the type of `denominators`.
    """
    if mode == "sample_mean":
        return (1.0 / (denominators.clamp(min=1) * max(rollouts, 1)))[rows]
    if mode == "token_mean":
        scale = 1.0 / max(tokens, 1)
    elif mode == "constant_length":
        if not constant_length or constant_length < 1:
            raise ConfigError(f"reduction {mode} needs a length above 0, got {constant_length}")
        scale = 1.0 / (constant_length * max(rollouts, 1))
    else:
        raise ConfigError(
            f"unknown reduction {mode!r}: use sample_mean, token_mean or constant_length"
        )
    return torch.full(rows.shape, scale, dtype=denominators.dtype, device=rows.device)


def weighted_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight * value over trained tokens; NaN elsewhere cannot enter. [P] -> scalar

    Zero with a gradient path where nothing is trained.
    """
    return (masked(values, mask) * masked(weights, mask).to(values.dtype)).sum()
