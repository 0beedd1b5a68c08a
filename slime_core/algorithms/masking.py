"""Masks and sums over the rows of a flat token column.

Layout of this package: P tokens of k rows, flat. `mask` bool [P] says which are trained, `rows`
int64 [P] which row (0..k-1) each belongs to. Padding is just another masked token.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is 4.9e8: beyond it a ratio says "off policy" and nothing else, and would overflow.
LOG_RATIO_BOUND = 20.0


def masked(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Replaces what stands outside the mask, values and gradient, also NaN and Inf.

    Never by a product: 0 * NaN is NaN, forward and backward.
    """
    return torch.where(mask, values, torch.full_like(values, fill))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-20; no gradient beyond the bound."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def k3_divergence(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x >= 0, x clamped inside the exponential only.

    By expm1: written out, float32 keeps no digit of it for |x| < 3e-4, where training begins.
    """
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1() - log_ratio


def row_sums(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Sums each row's tokens. [P] -> [k]

    Equal inputs give equal bits, as ranks that hold the same tokens need: on a GPU index_add adds
    in any order, and what sorts does not.
    """
    sums = values.new_zeros(num_rows)
    if values.is_cuda:
        return sums.index_put((rows,), values, accumulate=True)
    return sums.index_add(0, rows, values)


def row_counts(mask: Tensor, rows: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Trained tokens of each row, at least 1 so that it can divide. [P] -> [k]"""
    return row_sums(mask.to(dtype), rows, num_rows).clamp(min=1)


def row_means(values: Tensor, mask: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Mean over each row's trained tokens; 0 for a row without any. [P] -> [k]"""
    counts = row_counts(mask, rows, num_rows, values.dtype)
    return row_sums(masked(values, mask), rows, num_rows) / counts
