"""A model folder: its configuration, and whether its weights fit it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from slime_core.check.findings import Findings
from slime_core.check.weights import TensorHeader, read_headers
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError
from slime_core.weights.megatron_folder import MARK, is_megatron, iteration_folder
from slime_core.weights.tables import TABLES, ModelShape, bind, read_shape

LAYER = re.compile(r"model\.layers\.(\d+)\.")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Size of an axis in a table -> key of config.json that gives it.
KEYS = {"hidden": "hidden_size", "ffn": "intermediate_size", "vocab": "vocab_size",
        "experts": "num_experts", "expert_ffn": "moe_intermediate_size"}  # fmt: skip


def check_models(config: RunConfig, findings: Findings) -> ModelShape | None:
    """Looks at every model folder that the run reads; returns the policy's shape."""
    folders = {"hf_checkpoint": config.rollout.hf_checkpoint}
    algorithm = config.algorithm
    if algorithm.use_kl_loss or algorithm.kl_coef > 0:
        folders["ref_load"] = algorithm.ref_load or config.rollout.hf_checkpoint
    if algorithm.use_opd and algorithm.opd_teacher_load:
        folders["opd_teacher_load"] = algorithm.opd_teacher_load
    if config.rollout.megatron_load is not None:
        findings.attempt(lambda: _start(Path(str(config.rollout.megatron_load))))
    shapes: dict[str, ModelShape | None] = {}
    for field, folder in folders.items():
        if field != "hf_checkpoint" and is_megatron(Path(folder)):
            findings.attempt(lambda p=folder: iteration_folder(Path(p)))
            continue
        if folder not in shapes:
            shapes[folder] = findings.attempt(lambda f=field, p=folder: _shape(f, Path(p)))
            shape = shapes[folder]
            if shape is not None:
                findings.attempt(lambda f=field, p=folder, s=shape: _weights(f, Path(p), s))
    shape = shapes[config.rollout.hf_checkpoint]
    if shape is not None:
        findings.fact(
            "model", folder=config.rollout.hf_checkpoint, family=shape.model_type,
            parameters=parameters(shape), layers=shape.num_layers, hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size, context_tokens=shape.max_positions, dtype=shape.dtype,
        )  # fmt: skip
    return shape


def _start(folder: Path) -> None:
    """A Megatron checkpoint, or one iteration of it."""
    if not (is_megatron(folder) or (folder / "metadata.json").is_file()):
        raise ConfigError(
            f"megatron_load {folder} is no Megatron checkpoint: it has neither {MARK} nor "
            "metadata.json; leave it out to begin with the weights in hf_checkpoint"
        )
    iteration_folder(folder)


def parameters(shape: ModelShape) -> int:
    """Number of parameters of a model."""
    return sum(math.prod(size) for entry in bind(shape) for size in entry.hf_shapes)


def _shape(field: str, folder: Path) -> ModelShape:
    if folder.is_file():
        raise ConfigError(f"{field} {folder} is a file: give the folder that holds config.json")
    if not folder.is_dir():
        hint = "give the folder of a Hugging Face model (config.json, *.safetensors, tokenizer)"
        if HUB_NAME.fullmatch(str(folder)):
            hint = (
                f"download it first (hf download {folder} --local-dir FOLDER) and give the folder"
            )
        raise ConfigError(f"{field} {folder}: no such folder; {hint}")
    path = folder / "config.json"
    config = _json(field, path)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in TABLES:
        raise ConfigError(
            f"{path}: model_type {family!r} is not supported; the supported ones are "
            f"{', '.join(sorted(TABLES))}"
        )
    _sizes(config, path)
    return read_shape(folder)


def _json(field: str, path: Path) -> dict[str, Any]:
    if is_megatron(path.parent):
        raise ConfigError(
            f"{field} {path.parent} is a Megatron checkpoint: give a Hugging Face folder, whose "
            "config.json and tokenizer are needed, and this one as megatron_load"
        )
    if not path.is_file():
        there = ", ".join(sorted(item.name for item in path.parent.iterdir())[:8])
        raise ConfigError(
            f"{field} {path.parent} is not a model: it has no config.json (it has "
            f"{there or 'nothing'}); give the folder of a Hugging Face model"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: download it again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold an object of keys and values: download it again")
    return config


def _sizes(config: dict[str, Any], path: Path) -> None:
    """Keys whose absence or type would only be noticed where they are used."""
    needed = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "vocab_size", "max_position_embeddings",
    )  # fmt: skip
    missing = [key for key in (*needed, "rms_norm_eps") if key not in config]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}: take the model's own config.json")
    optional = [key for key in ("num_key_value_heads", "head_dim") if config.get(key) is not None]
    for key in (*needed, *optional):
        if type(config[key]) is not int or config[key] < 1:
            raise ConfigError(f"{path}: {key} must be a whole number from 1, not {config[key]!r}")


def _weights(field: str, folder: Path, shape: ModelShape) -> None:
    """Compares the headers of the weights with what config.json makes of the model."""
    headers = read_headers(folder)
    where = f"{field} {folder}: config.json and weights do not belong together"
    layers = {int(match[1]) for name in headers if (match := LAYER.match(name))}
    if layers and max(layers) + 1 != shape.num_layers:
        raise ConfigError(
            f"{where}: num_hidden_layers is {shape.num_layers}, but the weights have "
            f"{max(layers) + 1} layers: take both from one model"
        )
    wrong = _mismatches(headers, shape)
    if wrong:
        more = f" (and {len(wrong) - 1} further tensors)" if len(wrong) > 1 else ""
        raise ConfigError(f"{where}: {wrong[0]}{more}: take both from one model")


def _mismatches(headers: dict[str, TensorHeader], shape: ModelShape) -> list[str]:
    wrong = []
    axes = {shape.size_of(axis): key for axis, key in KEYS.items()}
    for entry in bind(shape):
        for name, expected in zip(entry.hf_names, entry.hf_shapes, strict=True):
            found = headers.get(name)
            if found is None:
                tied = " (or set tie_word_embeddings)" if name == "lm_head.weight" else ""
                wrong.append(f"the weights lack the tensor {name}{tied}")
            elif found.shape != expected:
                keys = [axes[size] for size in expected if size in axes]
                because = f" ({', '.join(f'{k} {s}' for k, s in zip(keys, expected))})"  # noqa: B905
                wrong.append(
                    f"{name} is {list(found.shape)} in {found.file}, but config.json makes it "
                    f"{list(expected)}{because if len(keys) == len(expected) else ''}"
                )
    return wrong
