"""TrainBatch: one iteration's samples as columns, the form in which the trainer receives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from slime_core.errors import DataError

# Column name -> (dtype, what it is parallel to).
_COLUMNS: dict[str, tuple[type[np.generic], str]] = {
    "tokens": (np.int32, "tokens"),
    "token_offsets": (np.int64, "offsets"),
    "response_lengths": (np.int64, "rows"),
    "loss_mask": (np.uint8, "response"),
    "rollout_log_probs": (np.float32, "response"),
    "response_offsets": (np.int64, "offsets"),
    "rewards": (np.float64, "rows"),
    "raw_rewards": (np.float64, "rows"),
    "group_ids": (np.int64, "rows"),
    "rollout_ids": (np.int64, "rows"),
    "denominators": (np.float64, "rows"),
    "truncated": (np.uint8, "rows"),
}


@dataclass(frozen=True)
class TrainBatch:
    """n samples in batch order, columnar. Ragged columns are flat with offsets.

    A sequence is prompt + response. Response token j of a sequence of T tokens with R response
    tokens stands at position T - R + j and is predicted by the logits at the position before it,
    so a row with a response needs at least one prompt token.

    Attributes:
        tokens: int32 [sum T], all sequences one after another.
        token_offsets: int64 [n + 1], row i is tokens[token_offsets[i]:token_offsets[i + 1]].
        response_lengths: int64 [n], R of each row; observation tokens count.
        loss_mask: uint8 [sum R], 1 where a response token is trained.
        rollout_log_probs: float32 [sum R], the engine's log-probs; 0 for observation tokens.
        response_offsets: int64 [n + 1] into loss_mask and rollout_log_probs.
        rewards: float64 [n], what the advantage starts from: the estimator's group transform
            (for GRPO (r - group mean) / (group std + 1e-6)) has been applied already. They are
            sealed in batch.json, so a replay does not compute them again.
        raw_rewards: float64 [n], as graded. For metrics, never for the loss.
        group_ids: int64 [n], the draw a sample belongs to.
        rollout_ids: int64 [n], one id per rollout. Samples fanned out of one rollout share it.
        denominators: float64 [n], the number of trained tokens of the whole rollout: the mask
            sum over all rows with the same rollout id, also of rows that are not in this object.
            A per-sample token mean divides by it, so a fanned-out rollout counts once.
        steps: row indices of each optimizer step. A row is in one step at most; a row in none is
            not trained.
        truncated: uint8 [n], 1 where generation ended at a length limit.
        metadata: [n] the samples' `train_metadata` for hooks; () where no sample has any.
        routes: [n] experts that the engine chose, [first tokens of the row, layers, k] each, views
            of the stored ones, or None; () where no sample has any.

    Raises:
        DataError: a column has the wrong type or length, or values contradict each other.
    """

    tokens: np.ndarray
    token_offsets: np.ndarray
    response_lengths: np.ndarray
    loss_mask: np.ndarray
    rollout_log_probs: np.ndarray
    response_offsets: np.ndarray
    rewards: np.ndarray
    raw_rewards: np.ndarray
    group_ids: np.ndarray
    rollout_ids: np.ndarray
    denominators: np.ndarray
    steps: tuple[tuple[int, ...], ...]
    truncated: np.ndarray
    metadata: tuple[dict[str, Any] | None, ...] = ()
    routes: tuple[np.ndarray | None, ...] = ()

    def __post_init__(self) -> None:
        _check_columns(self)
        _check_offsets(self)
        _check_values(self)
        _check_steps(self)

    @property
    def num_rows(self) -> int:
        return len(self.response_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: prompt + response tokens of each row."""
        return np.diff(self.token_offsets)

    @property
    def prompt_lengths(self) -> np.ndarray:
        """int64 [n]: tokens before the response."""
        return self.lengths - self.response_lengths

    @property
    def mask_sums(self) -> np.ndarray:
        """int64 [n]: trained tokens of each row (the row alone, without its siblings)."""
        return segment_sums(self.loss_mask, self.response_offsets)

    @property
    def response_rows(self) -> np.ndarray:
        """int64 [sum R]: the row of each response token."""
        return np.repeat(np.arange(self.num_rows, dtype=np.int64), self.response_lengths)

    def row_tokens(self, row: int) -> np.ndarray:
        """int32 [T] view of one sequence."""
        return self.tokens[self.token_offsets[row] : self.token_offsets[row + 1]]

    def row_response(self, row: int) -> slice:
        """Where one row's response lies in loss_mask, rollout_log_probs and every such array."""
        return slice(int(self.response_offsets[row]), int(self.response_offsets[row + 1]))

    def select(self, rows: Sequence[int] | np.ndarray) -> TrainBatch:
        """Copies the given rows, in the given order.

        Denominators stay those of the whole rollouts. Steps keep the selected rows under their
        new indices; a step that lost all its rows is left out.

        Raises:
            DataError: a row is out of range or given twice.
        """
        index = np.asarray(rows, dtype=np.int64).reshape(-1)
        if index.size and (index.min() < 0 or index.max() >= self.num_rows):
            raise DataError(f"select: rows must be within 0..{self.num_rows - 1}, got {rows!r}")
        if len(np.unique(index)) != len(index):
            raise DataError(f"select: a row is given twice in {rows!r}")
        tokens, token_offsets = _take_ragged(self.tokens, self.token_offsets, index)
        mask, response_offsets = _take_ragged(self.loss_mask, self.response_offsets, index)
        log_probs, _ = _take_ragged(self.rollout_log_probs, self.response_offsets, index)
        new_row = {int(old): new for new, old in enumerate(index)}
        kept = (tuple(new_row[r] for r in step if r in new_row) for step in self.steps)
        plain = {
            name: getattr(self, name)[index] for name, (_, of) in _COLUMNS.items() if of == "rows"
        }
        return TrainBatch(
            tokens=tokens,
            token_offsets=token_offsets,
            loss_mask=mask,
            rollout_log_probs=log_probs,
            response_offsets=response_offsets,
            steps=tuple(step for step in kept if step),
            metadata=tuple(self.metadata[row] for row in index) if self.metadata else (),
            routes=tuple(self.routes[row] for row in index) if self.routes else (),
            **plain,
        )


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [n + 1] offsets of n ragged rows."""
    out = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def segment_sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sums of a flat column over its rows: int64 for integers, float64 otherwise. [n]"""
    dtype = np.int64 if np.issubdtype(values.dtype, np.integer) else np.float64
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return np.bincount(rows, weights=values, minlength=len(offsets) - 1).astype(dtype)


def _take_ragged(
    flat: np.ndarray, offsets: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.diff(offsets)[rows]
    new_offsets = offsets_of(lengths)
    shift = np.repeat(offsets[rows] - new_offsets[:-1], lengths)
    return flat[np.arange(new_offsets[-1]) + shift], new_offsets


def _check_columns(batch: TrainBatch) -> None:
    for field in fields(batch):
        if field.name not in _COLUMNS:
            continue
        dtype, _ = _COLUMNS[field.name]
        column = getattr(batch, field.name)
        if not isinstance(column, np.ndarray) or column.dtype != dtype or column.ndim != 1:
            found = (
                f"{column.dtype} with {column.ndim} axes"
                if isinstance(column, np.ndarray)
                else type(column).__name__
            )
            raise DataError(
                f"TrainBatch.{field.name} must be a flat {np.dtype(dtype)} array, got {found}"
            )


def _check_offsets(batch: TrainBatch) -> None:
    n = batch.num_rows
    totals = {}
    for name, flat in (("token_offsets", "tokens"), ("response_offsets", "loss_mask")):
        offsets, size = getattr(batch, name), len(getattr(batch, flat))
        if len(offsets) != n + 1 or offsets[0] != 0 or offsets[-1] != size:
            raise DataError(
                f"TrainBatch.{name} must hold {n + 1} values from 0 to {size} "
                f"(the length of {flat}), got {len(offsets)} values"
            )
        if np.any(np.diff(offsets) < 0):
            raise DataError(f"TrainBatch.{name} must not decrease")
        totals[name] = size
    expected = {"rows": n, "response": totals["response_offsets"]}
    for name, (_, of) in _COLUMNS.items():
        if of in expected and len(getattr(batch, name)) != expected[of]:
            raise DataError(
                f"TrainBatch.{name} has {len(getattr(batch, name))} values, expected {expected[of]}"
            )

    for name in ("metadata", "routes"):
        if len(getattr(batch, name)) not in (0, n):
            raise DataError(
                f"TrainBatch.{name} has {len(getattr(batch, name))} values, expected {n}"
            )


def _first_bad(bad: np.ndarray) -> int | None:
    return int(np.argmax(bad)) if bad.any() else None


def _check_values(batch: TrainBatch) -> None:
    if np.any(batch.loss_mask > 1):
        raise DataError("TrainBatch.loss_mask must hold 0 and 1 only")
    checks = (
        (
            batch.response_lengths != np.diff(batch.response_offsets),
            "response_lengths contradicts response_offsets",
        ),
        (
            (batch.response_lengths > 0) & (batch.prompt_lengths < 1),
            "a response needs at least one prompt token before it",
        ),
        (batch.prompt_lengths < 0, "the response is longer than the sequence"),
        (~np.isfinite(batch.rewards), "the reward is not finite"),
        (
            ~(batch.denominators >= batch.mask_sums),
            "the rollout's denominator is smaller than the row's own trained tokens",
        ),
    )
    for bad, message in checks:
        row = _first_bad(bad)
        if row is not None:
            raise DataError(
                f"TrainBatch row {row} (group {batch.group_ids[row]}, rollout "
                f"{batch.rollout_ids[row]}): {message}"
            )


def _check_steps(batch: TrainBatch) -> None:
    rows = [row for step in batch.steps for row in step]
    if any(row < 0 or row >= batch.num_rows for row in rows):
        raise DataError(f"TrainBatch.steps names a row outside 0..{batch.num_rows - 1}")
    if len(set(rows)) != len(rows):
        raise DataError("TrainBatch.steps names a row twice")
    if any(not step for step in batch.steps):
        raise DataError("TrainBatch.steps has an empty optimizer step")
