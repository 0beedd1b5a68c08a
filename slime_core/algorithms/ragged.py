"""Ragged rows as a padded matrix and back, and the reverse discounted sum over it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCAN_CHUNK = 128


@dataclass(frozen=True)
class RowLayout:
    """k rows of tokens one after another in a flat column, in row order.

    Attributes:
        lengths: int64 [k], tokens of each row.
    """

    lengths: Tensor

    @property
    def rows(self) -> Tensor:
        """int64 [P]: row of each token."""
        numbers = torch.arange(len(self.lengths), device=self.lengths.device)
        return numbers.repeat_interleave(self.lengths)

    def _places(self) -> tuple[Tensor, int]:
        width = int(self.lengths.max()) if len(self.lengths) else 0
        columns = torch.arange(width, device=self.lengths.device)
        return columns < self.lengths[:, None], width

    def pad(self, flat: Tensor) -> Tensor:
        """[P] -> [k, T], right-padded with 0."""
        inside, width = self._places()
        return flat.new_zeros(len(self.lengths), width).masked_scatter(inside, flat)

    def unpad(self, padded: Tensor) -> Tensor:
        """[k, T] -> [P]"""
        return padded[self._places()[0]]


def reverse_discounted_sum(values: Tensor, discount: float, chunk: int = SCAN_CHUNK) -> Tensor:
    """y_t = x_t + discount * y_{t + 1}, along the last axis.

    Chunks of `chunk` tokens are one product with a triangular matrix of powers each, so a
    sequence of T tokens takes T / chunk steps instead of T.

    Args:
        values: [k, T]
        discount: in [0, 1].
        chunk: tokens a step.
    """
    rows, width = values.shape
    out = torch.empty_like(values)
    steps = torch.arange(chunk, device=values.device, dtype=values.dtype)
    gap = steps[:, None] - steps  # gap[s, t] = s - t: x_s reaches y_t discounted s - t times
    powers = torch.where(gap >= 0, discount ** gap.clamp(min=0), gap.new_zeros(()))
    carry = values.new_zeros(rows)
    for end in range(width, 0, -chunk):
        start = max(end - chunk, 0)
        n = end - start
        to_end = discount ** (n - steps[:n])
        piece = values[:, start:end] @ powers[:n, :n] + carry[:, None] * to_end
        out[:, start:end] = piece
        carry = piece[:, 0]
    return out
