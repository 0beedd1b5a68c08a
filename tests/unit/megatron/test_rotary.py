"""Rotary positions against transformers' and their defining property."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from slime_core.megatron.rotary import rotary_tables, rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_as_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    frequencies = 1.0 / (1e4 ** (torch.arange(0, 16, 2).float() / 16))
    positions = torch.tensor([0, 1, 2, 0, 1, 77])
    heads = torch.randn(6, 3, 16).to(dtype)
    angles = torch.cat([positions.float()[:, None] * frequencies] * 2, -1)
    want, _ = apply_rotary_pos_emb(
        heads.transpose(0, 1)[None],
        heads.transpose(0, 1)[None],
        angles.cos().to(dtype)[None],
        angles.sin().to(dtype)[None],
    )
    got = rotate(heads, *rotary_tables(frequencies, positions, dtype))
    assert torch.equal(got, want[0].transpose(0, 1))


def test_scores_depend_on_the_distance_only() -> None:
    torch.manual_seed(0)
    frequencies = 1.0 / (1e4 ** (torch.arange(0, 8, 2).double() / 8)).float()
    query, key = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def score(query_at: int, key_at: int) -> float:
        turned = [
            rotate(x, *rotary_tables(frequencies, torch.tensor([at]), torch.float64))
            for x, at in ((query, query_at), (key, key_at))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(5, 2) == pytest.approx(score(103, 100), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)
    assert score(0, 0) == pytest.approx(float((query * key).sum()))
