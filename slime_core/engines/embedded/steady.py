"""Matrix products in which a row's bits do not depend on the rows beside it.

A CPU's matrix library picks its kernel by the number of rows, and where that changes the order of a
sum depends on the processor. Products of one fixed number of rows leave nothing to pick.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

ROWS = 32
"""Rows of every product: enough to keep a core busy, few enough to waste little on a lone one."""


def steady(module: torch.nn.Module) -> None:
    """Makes the linear layers of a model compute in blocks of ROWS rows, padded with zeros."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.forward = partial(by_blocks, layer)


def by_blocks(layer: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The layer's output [..., out] for input [..., in], ROWS rows at a time."""
    flat = input.reshape(-1, input.shape[-1])
    count = flat.shape[0]
    padded = functional.pad(flat, (0, 0, 0, -count % ROWS))
    blocks = [functional.linear(block, layer.weight, layer.bias) for block in padded.split(ROWS)]
    whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return whole[:count].reshape(*input.shape[:-1], -1)
