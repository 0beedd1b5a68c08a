"""Qwen2 and Qwen2.5 (dense): biases on query, key and value only."""

from __future__ import annotations

from slime_core.weights.tables.dense import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    FINAL,
    INPUT_NORM,
    MLP,
    QKV_BIAS,
    QKV_WEIGHT,
)

TABLE = (EMBEDDING, INPUT_NORM, QKV_WEIGHT, QKV_BIAS, ATTENTION_OUTPUT, *MLP, *FINAL)
