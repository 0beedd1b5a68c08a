"""Which positions of a sequence each context-parallel rank holds (zigzag).

A sequence is cut into 2 * cp chunks of equal size; rank r holds chunks r and 2 * cp - 1 - r, so
that under a causal mask early (cheap) and late (dear) chunks even out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slime_core.batching.pack import PackedMicroBatch
from slime_core.errors import ConfigError, DataError

Range = tuple[int, int]


@dataclass(frozen=True)
class RankRanges:
    """What one rank holds of a sequence; all ranges half open, (0, 0) where empty.

    Attributes:
        chunk: positions a chunk; the last chunks may reach beyond the sequence, into padding.
        chunks: the two position ranges.
        logits: positions within each chunk whose logits predict a response token.
        tokens: the positions of those response tokens (one further).
    """

    chunk: int
    chunks: tuple[Range, Range]
    logits: tuple[Range, Range]
    tokens: tuple[Range, Range]


def zigzag_ranges(total: int, response: int, cp_size: int, rank: int) -> RankRanges:
    """The share of one rank. Over all ranks every response token is owned exactly once.

    Args:
        total: tokens of the sequence.
        response: response tokens at its end, fewer than total.
        cp_size: context-parallel size.
        rank: 0..cp_size - 1.
    """
    if cp_size < 1 or not 0 <= rank < cp_size:
        raise ConfigError(f"context-parallel rank {rank} does not exist among {cp_size}")
    if not 0 <= response < total:
        raise DataError(
            f"a sequence of {total} tokens cannot have {response} response tokens: at least one "
            "prompt token must come before them"
        )
    chunk = -(-total // (2 * cp_size))
    starts = (rank * chunk, (2 * cp_size - 1 - rank) * chunk)
    chunks = ((starts[0], starts[0] + chunk), (starts[1], starts[1] + chunk))
    predicting = (total - response - 1, total - 1)
    logits = (_overlap(chunks[0], predicting), _overlap(chunks[1], predicting))
    tokens = (_next(logits[0]), _next(logits[1]))
    return RankRanges(chunk, chunks, logits, tokens)


@dataclass(frozen=True)
class PackShare:
    """One rank's share of a pack of S tokens with P read positions.

    Attributes:
        tokens, position_ids: int64 [S / cp].
        index: int64 [own], where in the share the logits of its read positions stand.
        own: int64 [own], which of the P positions these are.
        order: int64 [P], where each position stands when the ranks' values are put one after
            another, each rank's filled up to `most`.
        most: the largest number of positions on a rank.
    """

    tokens: np.ndarray
    position_ids: np.ndarray
    index: np.ndarray
    own: np.ndarray
    order: np.ndarray
    most: int


def locate(places: np.ndarray, cu_seqlens: np.ndarray, cp_size: int) -> tuple[np.ndarray, ...]:
    """The owner of tokens of a pack, and where in the owner's share they stand.

    Args:
        places: int64 [n] in the pack.
        cu_seqlens: [sequences + 1]; each sequence a multiple of 2 * cp_size tokens.
        cp_size: context-parallel size.

    Returns:
        Two int64 [n].
    """
    cu_seqlens = cu_seqlens.astype(np.int64)
    if (np.diff(cu_seqlens) % (2 * cp_size)).any():
        raise DataError(f"sequences must be multiples of {2 * cp_size} tokens, see pack")
    sequence = np.searchsorted(cu_seqlens, places, side="right") - 1
    start = cu_seqlens[sequence]
    chunk = (cu_seqlens[sequence + 1] - start) // (2 * cp_size)
    number, within = np.divmod(places - start, chunk)
    late = number >= cp_size
    owner = np.where(late, 2 * cp_size - 1 - number, number)
    return owner, start // cp_size + late * chunk + within


def share_of_pack(packed: PackedMicroBatch, cp_size: int, rank: int) -> PackShare:
    """Cuts a pack whose rows were made multiples of 2 * cp_size."""
    owner, place = locate(np.arange(len(packed.tokens)), packed.cu_seqlens, cp_size)
    mine = np.flatnonzero(owner == rank)
    mine = mine[np.argsort(place[mine])]
    reader, index = owner[packed.logit_index], place[packed.logit_index]
    counts = np.bincount(reader, minlength=cp_size)
    most = int(counts.max())
    order = np.empty(len(reader), dtype=np.int64)
    for other in range(cp_size):
        order[reader == other] = other * most + np.arange(counts[other])
    own = np.flatnonzero(reader == rank)
    return PackShare(
        tokens=packed.tokens[mine],
        position_ids=packed.position_ids[mine],
        index=index[own],
        own=own,
        order=order,
        most=most,
    )


def _overlap(a: Range, b: Range) -> Range:
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, end) if start < end else (0, 0)


def _next(part: Range) -> Range:
    return (part[0] + 1, part[1] + 1) if part != (0, 0) else part
