"""The chunks of a model that a rank holds: one, or several where its pipeline is interleaved.

Chunk c of pipeline stage p holds the layers of virtual stage c x stages + p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime_core.megatron.model import PolicyModel, local_entries
from slime_core.weights.tables import BoundEntry, ModelShape

Chunks = Sequence[PolicyModel]


def named_parameters(chunks: Chunks) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters. Their names are those inside a chunk, behind the number of the chunk
    where there are several."""
    return {
        prefix + name: parameter
        for prefix, chunk in _prefixed(chunks)
        for name, parameter in chunk.named_parameters()
    }


def bound_entries(chunks: Chunks, shape: ModelShape) -> dict[str, BoundEntry]:
    """Table entries by the names of `named_parameters`, see local_entries."""
    return {
        prefix + name: entry
        for prefix, chunk in _prefixed(chunks)
        for name, entry in local_entries(chunk, shape).items()
    }


def own_names(chunks: Chunks) -> list[str]:
    """Parameters, as `named_parameters` names them, that a checkpoint of the family does not
    have."""
    found = [
        prefix + name
        for prefix, chunk in _prefixed(chunks)
        for name in chunk.own_parameters & dict(chunk.named_parameters()).keys()
    ]
    return sorted(found)


def sharded_states(chunks: Chunks, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of any layout holds of the weights, by Megatron's names of chunks."""
    return {
        name: chunk.sharded_state_dict(metadata=dict(metadata))
        for name, chunk in zip(_state_names(chunks), chunks, strict=True)
    }


def load_states(chunks: Chunks, loaded: Mapping[str, Any], *, strict: bool = True) -> None:
    """Takes what `sharded_states` asked for."""
    for name, chunk in zip(_state_names(chunks), chunks, strict=True):
        chunk.load_state_dict(loaded[name], strict=strict)


def forget_activations(chunks: Chunks) -> None:
    """Drops what the dispatchers of experts keep of their last micro-batch: it holds the memory of
    that micro-batch's graph until the next one, and the whole model for ever, since the graph's
    hooks refer to it where Python's collector does not see them."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        dispatcher: Any = getattr(module, "token_dispatcher", None)
        for name, value in list(vars(dispatcher).items()) if dispatcher is not None else ():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, None)


def _state_names(chunks: Chunks) -> list[str]:
    if len(chunks) == 1:
        return ["model"]
    return [f"model{number}" for number in range(len(chunks))]


def _prefixed(chunks: Chunks) -> list[tuple[str, PolicyModel]]:
    if len(chunks) == 1:
        return [("", chunks[0])]
    return [(f"{number}.", chunk) for number, chunk in enumerate(chunks)]
