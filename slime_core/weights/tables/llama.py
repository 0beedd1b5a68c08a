"""Llama 2 and 3: no biases, no norms on heads."""

from __future__ import annotations

from slime_core.weights.tables.dense import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    FINAL,
    INPUT_NORM,
    MLP,
    QKV_WEIGHT,
)

TABLE = (EMBEDDING, INPUT_NORM, QKV_WEIGHT, ATTENTION_OUTPUT, *MLP, *FINAL)
