"""Attention of context-parallel ranks, put together again, against one call a sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_core.batching.context_parallel import locate
from slime_core.megatron.zigzag import chunk_attention, plan_chunks
from tests.unit.megatron.test_padded import CPU, one_by_one


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("lengths", [[1], [1, 2, 3, 37, 8], [64, 0, 5, 64, 11]])
def test_values_and_gradients_equal_separate_sequences(
    cp: int, kv_heads: int, scale: float | None, lengths: list[int]
) -> None:
    torch.manual_seed(0)
    padded = [-(-n // (2 * cp)) * 2 * cp for n in lengths]
    cu = np.array([0, *np.cumsum(padded)])
    total = int(cu[-1])
    q = torch.randn(total, 4, 8, dtype=torch.float64)
    k, v = (torch.randn(total, kv_heads, 8, dtype=torch.float64) for _ in range(2))
    weight = torch.arange(total * 32, dtype=torch.float64).view(total, 4, 8).cos()

    owner, place = locate(np.arange(total), cu, cp)
    gathered = torch.from_numpy(owner * (total // cp) + place)  # pack -> ranks one after another

    def over_ranks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ranked = torch.empty_like(gathered)
        ranked[gathered] = torch.arange(total)
        q, k, v = (x[ranked] for x in (q, k, v))
        share = total // cp
        parts = [
            chunk_attention(
                q[rank * share : (rank + 1) * share], k, v, plan_chunks(cu, cp, rank, CPU), scale
            )
            for rank in range(cp)
        ]
        return torch.cat(parts)[gathered]

    results = []
    for attend in (over_ranks, lambda q, k, v: one_by_one(q, k, v, cu.tolist(), scale)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(inputs[0], inputs[1], inputs[2])
        (out * weight).sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_chunks_of_similar_size_share_a_call() -> None:
    cu = np.array([0, 64, 128, 192, 196])
    groups = plan_chunks(cu, 2, 0, CPU)
    assert sorted((group.n, group.queries, group.keys) for group in groups) == [
        (2, 1, 4), (3, 16, 16), (3, 16, 64),
    ]  # fmt: skip
    assert sorted(torch.cat([group.tokens for group in groups]).tolist()) == list(range(98))
