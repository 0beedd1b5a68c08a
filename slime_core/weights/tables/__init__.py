"""One table per model family says how Hugging Face tensors and Megatron parameters correspond.

A table is used in both directions (loading and export), so the two can never disagree.
"""

from __future__ import annotations

import math

from slime_core.errors import ConfigError
from slime_core.near import nearest
from slime_core.weights.tables import llama, qwen2, qwen3, qwen3_moe
from slime_core.weights.tables.entry import BoundEntry, Entry
from slime_core.weights.tables.shape import ModelShape, padded_vocab_size, read_shape

TABLES: dict[str, tuple[Entry, ...]] = {
    "llama": llama.TABLE,
    "qwen2": qwen2.TABLE,
    "qwen3": qwen3.TABLE,
    "qwen3_moe": qwen3_moe.TABLE,
}

__all__ = [
    "TABLES",
    "BoundEntry",
    "Entry",
    "ModelShape",
    "active_parameters",
    "bind",
    "expert_parameters",
    "padded_vocab_size",
    "read_shape",
    "table_for",
]


def table_for(model_type: str) -> tuple[Entry, ...]:
    """The table of a Hugging Face `model_type`.

    Raises:
        ConfigError: no table for this family.
    """
    if model_type not in TABLES:
        near = nearest(model_type, TABLES)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(
            f"model_type {model_type!r} is not supported (known: {', '.join(sorted(TABLES))}){hint}"
        )
    return TABLES[model_type]


def bind(shape: ModelShape) -> tuple[BoundEntry, ...]:
    """Every parameter of a model, in canonical order: embedding, layers, final norm, head. In a
    layer experts come last, one after another.

    A tied model has no head of its own.
    """
    table = table_for(shape.model_type)
    bound = [entry.bind(shape) for entry in table if entry.place == "first"]
    for layer in range(shape.num_layers):
        rows = [entry for entry in table if entry.place == "layer"]
        bound += [entry.bind(shape, layer) for entry in rows if not entry.of_expert]
        for expert in range(shape.num_experts or 0):
            bound += [entry.bind(shape, layer, expert) for entry in rows if entry.of_expert]
    bound += [
        entry.bind(shape)
        for entry in table
        if entry.place == "last" and not (shape.tied and entry.untied_only)
    ]
    return tuple(bound)


def active_parameters(shape: ModelShape) -> int:
    """Parameters that a token meets on its way: of experts, as many as it goes to."""
    every = sum(math.prod(size) for entry in bind(shape) for size in entry.hf_shapes)
    experts = expert_parameters(shape)
    met = experts * (shape.experts_per_token or 0) // (shape.num_experts or 1)
    return every - experts + met


def expert_parameters(shape: ModelShape) -> int:
    """Parameters of all experts."""
    return sum(
        math.prod(size)
        for entry in bind(shape)
        if entry.expert is not None
        for size in entry.hf_shapes
    )
