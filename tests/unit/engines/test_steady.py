"""Rows of a linear layer, alone and among others."""

import pytest
import torch
from torch.nn import functional

from slime_core.engines.embedded.steady import ROWS, by_blocks


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (1, ROWS), (2, ROWS), (5, 100)])
def test_a_row_has_the_same_bits_in_every_crowd(bias, shape):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48, bias=bias).requires_grad_(False)
    inputs = torch.randn(*shape, 64)
    outputs = by_blocks(layer, inputs)
    assert outputs.shape == (*shape, 48)
    expected = functional.linear(inputs.double(), layer.weight.double(),
                                 layer.bias.double() if bias else None)  # fmt: skip
    assert torch.allclose(outputs.double(), expected, atol=1e-5)
    flat, rows = inputs.reshape(-1, 64), outputs.reshape(-1, 48)
    for at in (0, len(flat) // 2, len(flat) - 1):
        assert torch.equal(by_blocks(layer, flat[at]), rows[at])
