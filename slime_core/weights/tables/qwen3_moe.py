"""Qwen3 with experts instead of one feed-forward network a layer."""

from __future__ import annotations

from slime_core.weights.tables.dense import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    FINAL,
    HF_LAYER,
    INPUT_NORM,
    MEGATRON_LAYER,
    MLP,
    QK_NORMS,
    QKV_WEIGHT,
)
from slime_core.weights.tables.entry import Entry, Part
from slime_core.weights.tables.layouts import COLUMNS, GATE_UP, REPLICATED

_MEGATRON_EXPERT = MEGATRON_LAYER + "mlp.experts.local_experts.{expert}."
_HF_EXPERT = HF_LAYER + "mlp.experts.{expert}."

NORM_BEFORE_EXPERTS = MLP[0]
ROUTER = Entry(
    MEGATRON_LAYER + "mlp.router.weight",
    (Part(HF_LAYER + "mlp.gate.weight", ("experts", "hidden")),),
    REPLICATED,
)
EXPERTS = (
    Entry(
        _MEGATRON_EXPERT + "linear_fc1.weight",
        (
            Part(_HF_EXPERT + "gate_proj.weight", ("expert_ffn", "hidden")),
            Part(_HF_EXPERT + "up_proj.weight", ("expert_ffn", "hidden")),
        ),
        GATE_UP,
        of_expert=True,
    ),
    Entry(
        _MEGATRON_EXPERT + "linear_fc2.weight",
        (Part(_HF_EXPERT + "down_proj.weight", ("hidden", "expert_ffn")),),
        COLUMNS,
        of_expert=True,
    ),
)

TABLE = (
    EMBEDDING,
    INPUT_NORM,
    QKV_WEIGHT,
    *QK_NORMS,
    ATTENTION_OUTPUT,
    NORM_BEFORE_EXPERTS,
    ROUTER,
    *EXPERTS,
    *FINAL,
)
