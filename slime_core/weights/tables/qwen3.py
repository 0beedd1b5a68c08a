"""Qwen3 (dense): norms on query and key heads, no biases."""

from __future__ import annotations

from slime_core.weights.tables.dense import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    FINAL,
    INPUT_NORM,
    MLP,
    QK_NORMS,
    QKV_WEIGHT,
)

TABLE = (EMBEDDING, INPUT_NORM, QKV_WEIGHT, *QK_NORMS, ATTENTION_OUTPUT, *MLP, *FINAL)
