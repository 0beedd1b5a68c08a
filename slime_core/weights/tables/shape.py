"""The sizes and switches of a decoder, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError

EXPERT_FAMILIES = frozenset({"qwen3_moe"})


@dataclass(frozen=True)
class ModelShape:
    """What a Hugging Face config.json says about a decoder.

    Attributes:
        model_type: Hugging Face family name, for example "qwen3".
        num_layers, hidden_size, ffn_size, num_heads, num_kv_heads, head_dim: sizes.
        vocab_size: rows of the embedding in the Hugging Face checkpoint.
        padded_vocab_size: rows in Megatron; the rows beyond vocab_size are zero and never seen.
        max_positions: longest sequence the positions were made for, in tokens.
        norm_eps: epsilon of the RMS norms.
        tied: the head shares the embedding's weights.
        rope_theta: base of the rotary embedding.
        rope_type: "default" or a scaling that transformers knows, for example "llama3".
        rope_factor: of the scaling; 1 without one.
        dtype: dtype the checkpoint declares, without "torch.".
        num_experts, experts_per_token, expert_ffn_size: feed-forward networks a layer has, how many
            of them a token goes to, and the width of one. None in a dense model.
        normalized_routing: the weights of a token's experts add up to 1.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    max_positions: int
    norm_eps: float
    tied: bool
    rope_theta: float
    rope_type: str = "default"
    rope_factor: float = 1.0
    dtype: str = "float32"
    num_experts: int | None = None
    experts_per_token: int | None = None
    expert_ffn_size: int | None = None
    normalized_routing: bool = True

    def size_of(self, axis: str) -> int:
        """The length of an axis: hidden, ffn, experts, expert_ffn, vocab, head_dim, q, kv."""
        return {
            "hidden": self.hidden_size,
            "ffn": self.ffn_size,
            "experts": self.num_experts or 0,
            "expert_ffn": self.expert_ffn_size or 0,
            "vocab": self.vocab_size,
            "head_dim": self.head_dim,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
        }[axis]


def padded_vocab_size(vocab_size: int, multiple: int, tensor_parallel: int) -> int:
    """Rows of the padded vocabulary.

    The multiple does not grow with the tensor-parallel size, so that a checkpoint keeps its
    shapes when that size changes (as long as it divides `multiple`).
    """
    padded = -(-vocab_size // multiple) * multiple
    return -(-padded // tensor_parallel) * tensor_parallel


def read_shape(checkpoint: str | Path) -> ModelShape:
    """Reads `<checkpoint>/config.json`.

    Raises:
        ConfigError: the file is missing or unreadable, or asks for something that is not built.
    """
    path = Path(checkpoint) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} does not exist; hf_checkpoint must be a folder with a Hugging Face model"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    try:
        _refuse_unsupported(config, path)
        return _shape_of(config)
    except KeyError as error:
        raise ConfigError(f"{path} has no key {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds a value of a type that it never has ({error}): take the model's own"
        ) from error


def _shape_of(config: dict[str, Any]) -> ModelShape:
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    heads = config["num_attention_heads"]
    return ModelShape(
        model_type=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        padded_vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_type=rope.get("rope_type")
        or scaling.get("rope_type")
        or scaling.get("type")
        or "default",
        rope_factor=float(rope.get("factor") or scaling.get("factor") or 1.0),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix(
            "torch."
        ),
        **_experts_of(config),
    )


def _experts_of(config: dict[str, Any]) -> dict[str, Any]:
    if config["model_type"] not in EXPERT_FAMILIES:
        return {}
    return {
        # transformers 5 writes the second name, published folders have the first.
        "num_experts": config.get("num_experts") or config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "expert_ffn_size": config["moe_intermediate_size"],
        "normalized_routing": bool(config.get("norm_topk_prob", False)),
    }


def _refuse_unsupported(config: dict[str, Any], path: Path) -> None:
    biased = bool(config.get("attention_bias")) or bool(config.get("mlp_bias"))
    refusals = {
        "hidden_act other than silu": config.get("hidden_act", "silu") != "silu",
        "attention_bias or mlp_bias": biased,
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "layer_types other than full_attention": any(
            kind != "full_attention" for kind in config.get("layer_types") or []
        ),
        "quantization_config": bool(config.get("quantization_config")),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0) not in (1, 1.0, None),
    }
    if config["model_type"] in EXPERT_FAMILIES:
        refusals |= {
            "layers without experts (mlp_only_layers, decoder_sparse_step)": bool(
                config.get("mlp_only_layers")
            )
            or config.get("decoder_sparse_step", 1) != 1,
            # Its weight would always be 1, so its router would learn nothing.
            "one expert a token with norm_topk_prob": config["num_experts_per_tok"] == 1
            and bool(config.get("norm_topk_prob", False)),
        }
    for name, wanted in refusals.items():
        if wanted:
            raise ConfigError(f"{path} asks for {name}, which the trainer does not support")
