"""Random rows of tokens, flat, and an independent float64 statement of each policy loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from slime_core.algorithms.losses.types import PolicyInputs


@dataclass
class Tokens:
    """k rows of P tokens in float64 numpy."""

    log_probs: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    rows: np.ndarray
    num_rows: int

    def inputs(self, dtype=torch.float64) -> tuple[PolicyInputs, torch.Tensor]:
        """The loss's input and the leaf whose gradient is looked at."""
        leaf = torch.tensor(self.log_probs, dtype=dtype, requires_grad=True)
        return self.inputs_of(leaf, dtype), leaf

    def inputs_of(self, log_probs: torch.Tensor, dtype=torch.float64) -> PolicyInputs:
        return PolicyInputs(
            log_probs=log_probs,
            old_log_probs=torch.tensor(self.old, dtype=dtype),
            advantages=torch.tensor(self.advantages, dtype=dtype),
            mask=torch.tensor(self.mask),
            rows=torch.tensor(self.rows),
            num_rows=self.num_rows,
        )

    def denominators(self) -> torch.Tensor:
        counts = np.bincount(self.rows, weights=self.mask, minlength=self.num_rows)
        return torch.tensor(counts, dtype=torch.float64)

    def keep(self, chosen: np.ndarray) -> Tokens:
        """Some rows only, renumbered in the order of `chosen`."""
        parts = [np.flatnonzero(self.rows == row) for row in chosen]
        index = np.concatenate(parts) if parts else np.zeros(0, dtype=int)
        rows = np.repeat(np.arange(len(chosen)), [len(part) for part in parts])
        columns = (getattr(self, n)[index] for n in ("log_probs", "old", "advantages", "mask"))
        return Tokens(*columns, rows, len(chosen))


def build_tokens(seed=0, lengths=(4, 1, 7, 3, 5), spread=0.3) -> Tokens:
    rng = np.random.default_rng(seed)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    old = -rng.gamma(2.0, 0.5, len(rows))
    mask = rng.random(len(rows)) < 0.75
    return Tokens(
        log_probs=old + rng.normal(0, spread, len(rows)),
        old=old,
        advantages=rng.normal(size=len(lengths))[rows],
        mask=mask,
        rows=rows,
        num_rows=len(lengths),
    )


@pytest.fixture(scope="module")
def make_tokens():
    return build_tokens
