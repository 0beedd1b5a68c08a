"""Sequences that no micro-batch can hold: refuse, cut or drop them, and count what happened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from slime_core.batching.select import rollout_denominators
from slime_core.batching.types import TrainBatch, offsets_of, segment_sums
from slime_core.errors import ConfigError, DataError

OverlongPolicy = Literal["error", "truncate", "drop"]


@dataclass(frozen=True)
class OverlongCounts:
    """What was done to a batch.

    Attributes:
        truncated_rows: rows cut at the end of their response.
        truncated_tokens: response tokens cut off.
        dropped_rows: rows taken out of their optimizer step.
    """

    truncated_rows: int = 0
    truncated_tokens: int = 0
    dropped_rows: int = 0


def apply_overlong_policy(
    batch: TrainBatch, max_tokens: int, policy: OverlongPolicy
) -> tuple[TrainBatch, OverlongCounts]:
    """Makes every trained row fit into max_tokens.

    A truncated row loses tokens at its end and is marked truncated; its rollout still counts.
    A dropped row stays in the batch, untrained and outside the steps, so the loss of its step is
    the mean over the rollouts that remain. Denominators are counted anew. A row whose prompt
    alone fills the limit is dropped under `truncate` too.

    Args:
        batch: the batch of the iteration, all rows of its rollouts in it.
        max_tokens: tokens of prompt + response a row may have.
        policy: what to do.

    Raises:
        DataError: policy is error and a row does not fit.
    """
    trained = np.zeros(batch.num_rows, dtype=bool)
    trained[[row for step in batch.steps for row in step]] = True
    too_long = trained & (batch.lengths > max_tokens)
    if not too_long.any():
        return batch, OverlongCounts()
    if policy == "error":
        row = int(np.argmax(too_long))
        raise DataError(
            f"{int(too_long.sum())} rows are longer than {max_tokens} tokens, the first is row "
            f"{row} (group {batch.group_ids[row]}) with {batch.lengths[row]}: raise "
            "--max-tokens-per-gpu, lower --rollout-max-response-len, or set --overlong-policy to "
            "truncate or drop"
        )
    if policy not in ("truncate", "drop"):
        raise ConfigError(f"unknown overlong policy {policy!r}: use error, truncate or drop")
    cut = too_long & (batch.prompt_lengths < max_tokens) & (policy == "truncate")
    dropped = too_long & ~cut
    excess = np.where(cut, batch.lengths - max_tokens, 0)
    counts = OverlongCounts(int(cut.sum()), int(excess.sum()), int(dropped.sum()))
    return _rebuild(batch, excess, cut, dropped), counts


def _rebuild(
    batch: TrainBatch, excess: np.ndarray, cut: np.ndarray, dropped: np.ndarray
) -> TrainBatch:
    token_keep = _all_but_last(batch.token_offsets, excess)
    response_keep = _all_but_last(batch.response_offsets, excess)
    loss_mask = np.where(dropped[batch.response_rows], 0, batch.loss_mask).astype(np.uint8)
    loss_mask = loss_mask[response_keep]
    response_lengths = batch.response_lengths - excess
    response_offsets = offsets_of(response_lengths)
    steps = (tuple(row for row in step if not dropped[row]) for step in batch.steps)
    return replace(
        batch,
        tokens=batch.tokens[token_keep],
        token_offsets=offsets_of(batch.lengths - excess),
        response_lengths=response_lengths,
        loss_mask=loss_mask,
        rollout_log_probs=batch.rollout_log_probs[response_keep],
        response_offsets=response_offsets,
        denominators=rollout_denominators(
            segment_sums(loss_mask, response_offsets), batch.rollout_ids
        ),
        steps=tuple(step for step in steps if step),
        truncated=np.where(cut, 1, batch.truncated).astype(np.uint8),
        routes=tuple(
            None if found is None else found[:left]
            for found, left in zip(batch.routes, batch.lengths - excess, strict=False)
        ),
    )


def _all_but_last(offsets: np.ndarray, excess: np.ndarray) -> np.ndarray:
    """bool [flat]: False for the last excess[i] values of row i."""
    lengths = np.diff(offsets)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return within < np.repeat(lengths - excess, lengths)


def fitting_rows(
    batch: TrainBatch, max_tokens: int | None, policy: OverlongPolicy
) -> tuple[TrainBatch, dict[str, float]]:
    """The batch with rows that fit a micro-batch, and metrics of those that did not.

    Args:
        max_tokens: None where micro-batches have no limit.

    Raises:
        DataError: none is left.
    """
    if policy == "error" or max_tokens is None:
        return batch, {}
    fitting, counts = apply_overlong_policy(batch, max_tokens, policy)
    if not fitting.steps:
        raise DataError(
            f"no row of the batch fits into max_tokens_per_gpu {max_tokens}: "
            "raise it, or lower rollout_max_response_len"
        )
    return fitting, {
        "overlong_truncated_rows": float(counts.truncated_rows),
        "overlong_truncated_tokens": float(counts.truncated_tokens),
        "overlong_dropped_rows": float(counts.dropped_rows),
    }
