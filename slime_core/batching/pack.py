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
        cu_seqlens: int32 [k + 1], or [k + 2] when there is padding behind the rows. Padding stands
            in a sequence of its own, or (row_multiple) at a row's end: causal attention of real
            tokens cannot see it.
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
    row_multiple: int = 1,
    positions: Literal["trained", "response"] = "trained",
    pad_token: int = 0,
) -> PackedMicroBatch:
    """Packs rows of a batch.

    Args:
        batch: the whole batch of the iteration.
        rows: rows of one micro-batch; may be empty, then only padding is packed.
        pad_to: the packed length is rounded up to a multiple of this, a multiple of row_multiple.
        row_multiple: the length of each row is rounded up to a multiple of this, so that it can be
            cut for context-parallel ranks.
        positions: read log-probs on trained tokens only, or on every response token.
        pad_token: id written into padding.
    """
    ids = np.asarray(rows, dtype=np.int64).reshape(-1)
    lengths = batch.lengths[ids]
    places = _places(lengths, pad_to, row_multiple)
    tokens = np.full(places.total, pad_token, dtype=np.int64)
    first = offsets_of(lengths)
    within_row = np.arange(first[-1]) - np.repeat(first[:-1], lengths)
    tokens[np.repeat(places.starts, lengths) + within_row] = batch.tokens[
        np.repeat(batch.token_offsets[ids], lengths) + within_row
    ]

    responses = batch.response_lengths[ids]
    ranges = offsets_of(responses)
    within = np.arange(ranges[-1]) - np.repeat(ranges[:-1], responses)
    local_rows = np.repeat(np.arange(len(ids)), responses)
    response_index = batch.response_offsets[ids][local_rows] + within
    logit_index = (places.starts + lengths - responses)[local_rows] + within - 1
    if positions == "trained":
        read = batch.loss_mask[response_index] == 1
        local_rows, response_index, logit_index = (
            column[read] for column in (local_rows, response_index, logit_index)
        )
    return PackedMicroBatch(
        tokens=tokens,
        position_ids=places.position_ids,
        cu_seqlens=places.cu_seqlens,
        max_seqlen=places.max_seqlen,
        row_ids=tuple(ids.tolist()),
        logit_index=logit_index,
        targets=tokens[logit_index + 1],
        rows=local_rows,
        response_index=response_index,
    )


def pack_sequence(
    tokens: Sequence[int], *, pad_to: int = 1, row_multiple: int = 1
) -> PackedMicroBatch:
    """One sequence by itself, all its tokens but the first being read. Padding as in `pack`."""
    n = len(tokens)
    places = _places(np.array([n]), pad_to, row_multiple)
    ids = np.zeros(places.total, dtype=np.int64)
    ids[:n] = tokens
    return PackedMicroBatch(
        tokens=ids,
        position_ids=places.position_ids,
        cu_seqlens=places.cu_seqlens,
        max_seqlen=places.max_seqlen,
        row_ids=(0,),
        logit_index=np.arange(n - 1),
        targets=ids[1:n],
        rows=np.zeros(n - 1, dtype=np.int64),
        response_index=np.arange(n - 1),
    )


@dataclass(frozen=True)
class _Places:
    """Where k rows stand in a pack of `total` tokens; the rest as in PackedMicroBatch.

    starts: int64 [k].
    """

    total: int
    starts: np.ndarray
    cu_seqlens: np.ndarray
    max_seqlen: int
    position_ids: np.ndarray


def _places(lengths: np.ndarray, pad_to: int, row_multiple: int) -> _Places:
    if row_multiple < 1 or pad_to < 1 or pad_to % row_multiple:
        raise DataError(
            f"pad_to must be at least 1 and a multiple of row_multiple {row_multiple}, got {pad_to}"
        )
    sizes = -(-lengths // row_multiple) * row_multiple
    used = int(sizes.sum())
    behind = -used % pad_to if used else pad_to
    sizes = np.append(sizes, behind) if behind else sizes
    cu_seqlens = offsets_of(sizes)
    return _Places(
        total=used + behind,
        starts=cu_seqlens[: len(lengths)],
        cu_seqlens=cu_seqlens.astype(np.int32),
        max_seqlen=int(sizes.max()),
        position_ids=np.arange(used + behind) - np.repeat(cu_seqlens[:-1], sizes),
    )
