"""Causal attention of a context-parallel rank's chunks.

A rank holds two chunks of every sequence (batching.context_parallel). The queries of a chunk need
the keys of all chunks before it, so keys and values are gathered over the ranks, and each chunk of
queries attends to a prefix of its sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as functional

from slime_core.batching.context_parallel import locate

# Chunks share one padded call while they are at most this much longer than the shortest.
_SPREAD = 1.25
_SPREAD_TOKENS = 8


@dataclass(frozen=True)
class ChunkGroup:
    """Chunks of similar size, computed as one padded batch of n.

    Attributes:
        n, queries, keys: the batch and its padded widths.
        query_source: int64 [n * queries], tokens of the share (padding repeats a real one).
        key_source: int64 [n * keys], tokens of the gathered shares.
        keep: int64 [tokens], the places of real queries.
        tokens: int64 [tokens], where those lie in the share.
        visible: bool [n, 1, queries, keys].
    """

    n: int
    queries: int
    keys: int
    query_source: torch.Tensor
    key_source: torch.Tensor
    keep: torch.Tensor
    tokens: torch.Tensor
    visible: torch.Tensor


@dataclass(frozen=True)
class _Chunk:
    """One chunk of queries: `length` tokens of the share from `start` on, and the places in the
    gathered shares of its keys, int64 [keys]. The last `length` keys are those of its queries."""

    length: int
    start: int
    keys: np.ndarray


def plan_chunks(
    cu_seqlens: np.ndarray, cp_size: int, rank: int, device: torch.device
) -> list[ChunkGroup]:
    """Groups the chunks of one rank by size.

    Args:
        cu_seqlens: [sequences + 1] of the whole pack, sequences being multiples of 2 * cp_size.
        cp_size, rank: place among the context-parallel ranks.
        device: of the plan.
    """
    chunks = _chunks(cu_seqlens.astype(np.int64), cp_size, rank)
    chunks.sort(key=lambda chunk: (len(chunk.keys), chunk.length))
    groups: list[list[_Chunk]] = []
    for chunk in chunks:
        if groups and _similar(groups[-1][0], chunk):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return [_group(members, device) for members in groups]


def _chunks(cu_seqlens: np.ndarray, cp_size: int, rank: int) -> list[_Chunk]:
    share = int(cu_seqlens[-1]) // cp_size
    found = []
    for start, end in pairwise(cu_seqlens.tolist()):
        if start == end:
            continue
        owner, place = locate(np.arange(start, end), cu_seqlens, cp_size)
        gathered = owner * share + place
        length = (end - start) // (2 * cp_size)
        for number in (rank, 2 * cp_size - 1 - rank):
            seen = (number + 1) * length
            found.append(_Chunk(length, int(place[number * length]), gathered[:seen]))
    return found


def _similar(short: _Chunk, long: _Chunk) -> bool:
    pairs = ((len(short.keys), len(long.keys)), (short.length, long.length))
    return all(max(b, a) <= max(_SPREAD * min(a, b), min(a, b) + _SPREAD_TOKENS) for a, b in pairs)


def _group(chunks: list[_Chunk], device: torch.device) -> ChunkGroup:
    lengths = torch.tensor([chunk.length for chunk in chunks])
    sizes = torch.tensor([len(chunk.keys) for chunk in chunks])
    starts = torch.tensor([chunk.start for chunk in chunks])
    queries, keys = int(lengths.max()), int(sizes.max())
    place = torch.arange(queries)
    real = place < lengths[:, None]  # [n, queries]
    source = (starts[:, None] + torch.where(real, place, 0)).flatten()
    key_source = np.stack([np.resize(chunk.keys, keys) for chunk in chunks])
    # Query i of a chunk is the key at (keys - queries + i). A query of padding sees real keys
    # first, so no row is empty.
    last = (sizes - lengths)[:, None] + place
    visible = torch.arange(keys) <= last[..., None]
    return ChunkGroup(
        n=len(chunks),
        queries=queries,
        keys=keys,
        query_source=source.to(device),
        key_source=torch.from_numpy(key_source.reshape(-1)).to(device),
        keep=torch.arange(len(chunks) * queries)[real.flatten()].to(device),
        tokens=source[real.flatten()].to(device),
        visible=visible[:, None].to(device),
    )


def chunk_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: list[ChunkGroup],
    scale: float | None,
) -> torch.Tensor:
    """Causal attention of one rank's chunks by padded SDPA, any device and dtype.

    Args:
        query: [t, heads, d] of the rank.
        key, value: [t * cp, kv heads, d], the ranks' one after another.
        groups: plan of the pack.
        scale: softmax scale; None means 1/sqrt(d).

    Returns:
        [t, heads, d]
    """
    grouped = query.size(1) != key.size(1)
    result = torch.zeros_like(query)
    for group in groups:
        q = _batch(query, group.query_source, group.n)
        k, v = (_batch(x, group.key_source, group.n) for x in (key, value))
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=group.visible, scale=scale, enable_gqa=grouped
        )  # [n, heads, queries, d]
        rows = out.transpose(1, 2).reshape(-1, *query.shape[1:]).index_select(0, group.keep)
        result = result.index_copy(0, group.tokens, rows)
    return result


def _batch(x: torch.Tensor, source: torch.Tensor, n: int) -> torch.Tensor:
    """[t, heads, d] -> [n, heads, width, d]"""
    return x.index_select(0, source).view(n, -1, *x.shape[1:]).transpose(1, 2)
