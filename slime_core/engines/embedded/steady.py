"""Matrix products in which a row's bits do not depend on the rows beside it.

A CPU's matrix library picks its kernel by the number of rows, and where that changes the order of a
sum depends on the processor. Products of one fixed number of rows leave nothing to pick.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from slime_core.errors import EngineError

FUSED_EXPERTS = "Qwen3MoeExperts"
"""A module of transformers with all experts of a layer."""
ROWS = 32
"""Rows of every product: enough to keep a core busy, few enough to waste little on a lone one."""


def steady(module: torch.nn.Module) -> None:
    """Makes the linear layers of a model compute in blocks of ROWS rows, padded with zeros.

    Raises:
        EngineError: it has layers whose products are made in other ways.
    """
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.forward = partial(by_blocks, layer)
        elif type(layer).__name__ == "Qwen3MoeTopKRouter":
            layer.forward = partial(router_by_blocks, layer)
        elif type(layer).__name__ == FUSED_EXPERTS:
            layer.forward = partial(experts_by_blocks, layer)
        elif hasattr(layer, "gate_up_proj") and not isinstance(layer.gate_up_proj, torch.nn.Module):
            raise EngineError(
                f"{type(layer).__name__} cannot compute each row for itself yet: serve this model "
                "without --enable-deterministic-inference"
            )


def by_blocks(layer: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The layer's output [..., out] for input [..., in], ROWS rows at a time."""
    return _product(input, layer.weight, layer.bias)


def router_by_blocks(
    router: Any, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of [..., hidden]: logits [tokens, experts], weights and ids of the chosen [tokens, k]."""
    logits = _product(hidden.reshape(-1, hidden.shape[-1]), router.weight)
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(router.top_k, -1)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(logits.dtype), chosen


def experts_by_blocks(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """A token's experts, added up in the order of their weights whatever tokens are beside it.

    Args:
        hidden: [tokens, hidden]
        chosen, weights: [tokens, k]
    """
    parts = hidden.new_zeros(*chosen.shape, hidden.shape[-1])
    for expert in chosen.unique().tolist():
        token, place = torch.where(chosen == expert)
        gate, up = _product(hidden[token], experts.gate_up_proj[expert]).chunk(2, -1)
        parts[token, place] = _product(experts.act_fn(gate) * up, experts.down_proj[expert])
    total = torch.zeros_like(hidden)
    for part, weight in zip(parts.unbind(1), weights.unbind(1), strict=True):
        total = total + part * weight[:, None]
    return total


def _product(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    flat = input.reshape(-1, input.shape[-1])
    count = flat.shape[0]
    padded = functional.pad(flat, (0, 0, 0, -count % ROWS))
    blocks = [functional.linear(block, weight, bias) for block in padded.split(ROWS)]
    whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return whole[:count].reshape(*input.shape[:-1], -1)
