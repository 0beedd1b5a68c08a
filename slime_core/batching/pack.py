"""Rows of a batch as one packed sequence (thd layout), with the places where log-probs are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slime_core.batching.types import TrainBatch, offsets_of
from slime_core.errors import DataError


@dataclass(frozen=True)
class PackedMicroBatch:
    """k rows one after another, then padding as a sequence of its own.

    P is the number of read positions: trained response tokens, or all response tokens.

    Attributes:
        tokens: int64 [S], S a multiple of pad_to.
        position_ids: int64 [S], starting at 0 in each sequence.
        cu_seqlens: int32 [k + 1], or [k + 2] when there is padding. Padding never shares a
            sequence with real tokens, so attention of real tokens cannot see it.
        max_seqlen: tokens of the longest sequence, padding included.
        row_ids: the rows of the batch, in packing order.
        logit_index: int64 [P], where in S the logits stand that predict the token.
        targets: int64 [P], the predicted token.
        rows: int64 [P], 0..k-1, which of row_ids the token belongs to.
        response_index: int64 [P] into the batch's flat response columns (loss_mask,
            rollout_log_probs, old log-probs, advantages).
    """

    tokens: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    max_seqlen: int
    row_ids: tuple[int, ...]
    logit_index: np.ndarray
    targets: np.ndarray
    rows: np.ndarray
    response_index: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.row_ids)


def pack(
    batch: TrainBatch,
    rows: Sequence[int],
    *,
    pad_to: int = 1,
    positions: Literal["trained", "response"] = "trained",
    pad_token: int = 0,
) -> PackedMicroBatch:
    """Packs rows of a batch.

    Args:
        batch: the whole batch of the iteration.
        rows: rows of one micro-batch; may be empty, then only padding is packed.
        pad_to: the packed length is rounded up to a multiple of this.
        positions: read log-probs on trained tokens only, or on every response token.
        pad_token: id written into padding.
    """
    if pad_to < 1:
        raise DataError(f"pad_to must be at least 1, got {pad_to}")
    ids = np.asarray(rows, dtype=np.int64).reshape(-1)
    lengths = batch.lengths[ids]
    starts = offsets_of(lengths)
    total = int(starts[-1])
    padding = -total % pad_to if total else pad_to
    sequence_lengths = np.append(lengths, padding) if padding else lengths
    cu_seqlens = offsets_of(sequence_lengths)

    tokens = np.full(total + padding, pad_token, dtype=np.int64)
    source = np.arange(total) + np.repeat(batch.token_offsets[ids] - starts[:-1], lengths)
    tokens[:total] = batch.tokens[source]
    position_ids = np.arange(total + padding) - np.repeat(cu_seqlens[:-1], sequence_lengths)

    responses = batch.response_lengths[ids]
    ranges = offsets_of(responses)
    within = np.arange(ranges[-1]) - np.repeat(ranges[:-1], responses)
    local_rows = np.repeat(np.arange(len(ids)), responses)
    response_index = batch.response_offsets[ids][local_rows] + within
    logit_index = (starts[1:] - responses)[local_rows] + within - 1
    if positions == "trained":
        read = batch.loss_mask[response_index] == 1
        local_rows, response_index, logit_index = (
            column[read] for column in (local_rows, response_index, logit_index)
        )
    return PackedMicroBatch(
        tokens=tokens,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens.astype(np.int32),
        max_seqlen=int(sequence_lengths.max()),
        row_ids=tuple(ids.tolist()),
        logit_index=logit_index,
        targets=tokens[logit_index + 1],
        rows=local_rows,
        response_index=response_index,
    )
