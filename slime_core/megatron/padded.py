"""Causal attention over packed sequences by padded calls to torch's SDPA: any device and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as functional

# Sequences share one padded call while the longest is at most this many times the shortest.
_SPREAD = 1.25
_SPREAD_TOKENS = 8


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences of similar length, computed as one padded batch of n rows and width tokens.

    Attributes:
        n, width: the batch. Padding stands at the right, where causality hides it.
        start: first token in the pack if the rows are contiguous and unpadded, else None.
        gather: int64 [n * width], the packed token of each place (padding repeats a real one).
        keep: int64 [tokens], the places of real tokens.
        tokens: int64 [tokens], where those lie in the pack.
    """

    n: int
    width: int
    start: int | None
    gather: torch.Tensor
    keep: torch.Tensor
    tokens: torch.Tensor


def plan_groups(cu_seqlens: list[int], device: torch.device) -> list[PaddedGroup]:
    """Groups the sequences of a pack by length. Empty sequences are left out."""
    spans = [(b - a, a) for a, b in pairwise(cu_seqlens) if b > a]
    spans.sort()
    groups: list[list[tuple[int, int]]] = []
    for length, start in spans:
        if groups and length <= max(_SPREAD * groups[-1][0][0], groups[-1][0][0] + _SPREAD_TOKENS):
            groups[-1].append((length, start))
        else:
            groups.append([(length, start)])
    return [_padded_group(group, device) for group in groups]


def _padded_group(spans: list[tuple[int, int]], device: torch.device) -> PaddedGroup:
    lengths = torch.tensor([length for length, _ in spans], device=device)
    starts = torch.tensor([start for _, start in spans], device=device)
    width = int(spans[-1][0])
    place = torch.arange(width, device=device)
    real = place < lengths[:, None]  # [n, width]
    source = starts[:, None] + torch.where(real, place, 0)
    flat = torch.arange(len(spans) * width, device=device)
    contiguous = all(a + n == b for (n, a), (_, b) in pairwise(spans))
    unpadded = all(length == width for length, _ in spans)
    return PaddedGroup(
        n=len(spans),
        width=width,
        start=spans[0][1] if contiguous and unpadded else None,
        gather=source.flatten(),
        keep=flat[real.flatten()],
        tokens=source.flatten()[real.flatten()],
    )


def padded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: list[PaddedGroup],
    scale: float | None,
) -> torch.Tensor:
    """Causal attention by padded SDPA, any device and dtype.

    Args:
        query: [t, heads, d]; key, value: [t, kv heads, d].
        groups: plan of the pack.
        scale: softmax scale; None means 1/sqrt(d).

    Returns:
        [t, heads, d]; zeros at tokens of no group.
    """
    grouped = query.size(1) != key.size(1)

    def one(group: PaddedGroup) -> torch.Tensor:
        q, k, v = (
            _rows(x, group).view(group.n, group.width, *x.shape[1:]).transpose(1, 2)
            for x in (query, key, value)
        )  # [n, heads, width, d]
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).reshape(group.n * group.width, *query.shape[1:])

    if len(groups) == 1 and groups[0].start == 0 and len(groups[0].tokens) == query.size(0):
        return one(groups[0])
    result = torch.zeros_like(query)
    for group in groups:
        rows = one(group)
        if group.start is None:
            rows = rows.index_select(0, group.keep)
        result = result.index_copy(0, group.tokens, rows)
    return result


def _rows(x: torch.Tensor, group: PaddedGroup) -> torch.Tensor:
    if group.start is not None:
        return x.narrow(0, group.start, group.n * group.width)
    return x.index_select(0, group.gather)
