"""Rows shared by dense decoders with RMS norms and a gated MLP."""

from __future__ import annotations

from slime_core.weights.tables.entry import Entry, Part
from slime_core.weights.tables.layouts import (
    COLUMNS,
    GATE_UP,
    QKV,
    REPLICATED,
    VOCABULARY,
)

MEGATRON_LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."

EMBEDDING = Entry(
    "embedding.word_embeddings.weight",
    (Part("model.embed_tokens.weight", ("vocab", "hidden")),),
    VOCABULARY,
    "first",
)
FINAL = (
    Entry(
        "decoder.final_layernorm.weight",
        (Part("model.norm.weight", ("hidden",)),),
        REPLICATED,
        "last",
    ),
    Entry(
        "output_layer.weight",
        (Part("lm_head.weight", ("vocab", "hidden")),),
        VOCABULARY,
        "last",
        untied_only=True,
    ),
)
INPUT_NORM = Entry(
    MEGATRON_LAYER + "input_layernorm.weight",
    (Part(HF_LAYER + "input_layernorm.weight", ("hidden",)),),
    REPLICATED,
)
QKV_WEIGHT = Entry(
    MEGATRON_LAYER + "self_attention.linear_qkv.weight",
    (
        Part(HF_LAYER + "self_attn.q_proj.weight", ("q", "hidden")),
        Part(HF_LAYER + "self_attn.k_proj.weight", ("kv", "hidden")),
        Part(HF_LAYER + "self_attn.v_proj.weight", ("kv", "hidden")),
    ),
    QKV,
)
QKV_BIAS = Entry(
    MEGATRON_LAYER + "self_attention.linear_qkv.bias",
    (
        Part(HF_LAYER + "self_attn.q_proj.bias", ("q",)),
        Part(HF_LAYER + "self_attn.k_proj.bias", ("kv",)),
        Part(HF_LAYER + "self_attn.v_proj.bias", ("kv",)),
    ),
    QKV,
)
QK_NORMS = (
    Entry(
        MEGATRON_LAYER + "self_attention.q_layernorm.weight",
        (Part(HF_LAYER + "self_attn.q_norm.weight", ("head_dim",)),),
        REPLICATED,
    ),
    Entry(
        MEGATRON_LAYER + "self_attention.k_layernorm.weight",
        (Part(HF_LAYER + "self_attn.k_norm.weight", ("head_dim",)),),
        REPLICATED,
    ),
)
ATTENTION_OUTPUT = Entry(
    MEGATRON_LAYER + "self_attention.linear_proj.weight",
    (Part(HF_LAYER + "self_attn.o_proj.weight", ("hidden", "q")),),
    COLUMNS,
)
MLP = (
    Entry(
        MEGATRON_LAYER + "pre_mlp_layernorm.weight",
        (Part(HF_LAYER + "post_attention_layernorm.weight", ("hidden",)),),
        REPLICATED,
    ),
    Entry(
        MEGATRON_LAYER + "mlp.linear_fc1.weight",
        (
            Part(HF_LAYER + "mlp.gate_proj.weight", ("ffn", "hidden")),
            Part(HF_LAYER + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        GATE_UP,
    ),
    Entry(
        MEGATRON_LAYER + "mlp.linear_fc2.weight",
        (Part(HF_LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),),
        COLUMNS,
    ),
)
