"""Reading config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_core.errors import ConfigError
from slime_core.weights.tables import read_shape

BASE: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 70,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    "dtype": "bfloat16",
}


EXPERTS: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": []},
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(BASE | changes))
    return folder


def test_sizes_and_defaults(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path))
    assert (shape.num_layers, shape.head_dim, shape.num_kv_heads) == (3, 16, 2)
    assert shape.rope_theta == 5e5
    assert shape.tied
    assert shape.dtype == "bfloat16"
    assert [shape.size_of(axis) for axis in ("q", "kv", "ffn", "vocab")] == [64, 32, 96, 70]


def test_experts_in_both_spellings(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, **EXPERTS))
    assert (shape.num_experts, shape.experts_per_token, shape.expert_ffn_size) == (8, 2, 24)
    assert shape.normalized_routing
    newer = {**EXPERTS, "num_experts": None, "num_local_experts": 8}
    assert read_shape(write(tmp_path, **newer)) == shape


def test_the_older_spelling_of_rope_and_dtype(tmp_path: Path) -> None:
    changes = {
        "rope_parameters": None,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "llama3"},
        "dtype": None,
        "torch_dtype": "float32",
    }
    shape = read_shape(write(tmp_path, **changes))
    assert (shape.rope_theta, shape.rope_type, shape.dtype) == (1e6, "llama3", "float32")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (EXPERTS | {"mlp_only_layers": [0]}, "layers without experts"),
        (EXPERTS | {"decoder_sparse_step": 2}, "layers without experts"),
        (EXPERTS | {"num_experts_per_tok": 1}, "one expert a token"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_shape(write(tmp_path, **changes))


def test_missing_file_key_and_broken_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="has no key"):
        read_shape(tmp_path)
