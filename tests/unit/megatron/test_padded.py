"""Packed attention by padded calls, against one call a sequence."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.megatron.padded import padded_attention, plan_groups

CPU = torch.device("cpu")


def offsets(lengths: list[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: list[int], scale: float | None
) -> torch.Tensor:
    out = torch.zeros_like(q)
    for a, b in pairwise(cu):
        if a < b:
            part = [x[a:b].transpose(0, 1)[None] for x in (q, k, v)]
            out[a:b] = functional.scaled_dot_product_attention(
                *part, is_causal=True, scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
    return out


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    kv_heads=st.sampled_from([1, 2, 4]),
    scale=st.sampled_from([None, 0.3]),
)
def test_values_and_gradients_equal_separate_sequences(
    lengths: list[int], kv_heads: int, scale: float | None
) -> None:
    torch.manual_seed(0)
    cu = offsets(lengths)
    q = torch.randn(cu[-1], 4, 8, dtype=torch.float64)
    k, v = (torch.randn(cu[-1], kv_heads, 8, dtype=torch.float64) for _ in range(2))
    results = []
    for attend in (
        lambda *x: padded_attention(*x, plan_groups(cu, CPU), scale),
        lambda *x: one_by_one(*x, cu, scale),
    ):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*inputs)
        (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()).sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_equal_lengths_need_no_gather_and_similar_ones_share_a_call() -> None:
    (group,) = plan_groups(offsets([10] * 7), CPU)
    assert (group.n, group.width, group.start) == (7, 10, 0)
    assert len(plan_groups(offsets([100, 3, 105, 4, 120]), CPU)) == 2
    assert len(plan_groups(offsets([5, 0, 0]), CPU)) == 1


def test_each_token_stands_in_exactly_one_group() -> None:
    lengths = [1, 300, 7, 7, 64, 65, 2, 299]
    groups = plan_groups(offsets(lengths), CPU)
    tokens = torch.cat([group.tokens for group in groups])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    wasted = sum(group.n * group.width for group in groups) / sum(lengths)
    assert wasted < 1.5
