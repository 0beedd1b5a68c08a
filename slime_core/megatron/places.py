"""Where the tokens that a rank computes stand in the batch."""

from __future__ import annotations

import numpy as np

from slime_core.batching.context_parallel import locate
from slime_core.batching.pack import PackedMicroBatch
from slime_core.batching.types import TrainBatch, offsets_of


def places_of(
    packed: PackedMicroBatch,
    batch: TrainBatch,
    context: tuple[int, int] = (1, 0),
    sequence: tuple[int, int] = (1, 0),
) -> np.ndarray:
    """Where the tokens that a rank's routers see stand in the batch.

    Args:
        context: context-parallel size, and the rank among them.
        sequence: the same of ranks that cut what is left once more (sequence parallelism).

    Returns:
        int64 [own tokens] into batch.tokens, -1 for padding.
    """
    ids = np.asarray(packed.row_ids, dtype=np.int64)
    lengths = batch.lengths[ids]
    first = offsets_of(lengths)
    within = np.arange(first[-1]) - np.repeat(first[:-1], lengths)
    starts = packed.cu_seqlens[: len(ids)].astype(np.int64)
    places = np.full(len(packed.tokens), -1, dtype=np.int64)
    places[np.repeat(starts, lengths) + within] = (
        np.repeat(batch.token_offsets[ids], lengths) + within
    )
    size, rank = context
    if size > 1:
        owner, at = locate(np.arange(len(places)), packed.cu_seqlens, size)
        mine = np.flatnonzero(owner == rank)
        places = places[mine[np.argsort(at[mine])]]
    size, rank = sequence
    return np.split(places, size)[rank]
