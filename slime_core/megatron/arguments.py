"""Megatron options by name: which exist, of which type, and where each one goes.

The known names are the fields of Megatron's own configuration classes plus the classic command
line names, mapped here. A check reads those classes as text (declared.py), so that the command line
can make it without importing Megatron; the trainer asks the classes themselves.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError
from slime_core.megatron.declared import declared_fields
from slime_core.megatron.option_bounds import check_bounds
from slime_core.megatron.option_types import check_type
from slime_core.megatron.settings import TrainerSettings
from slime_core.megatron.unsupported import refuse_unsupported
from slime_core.near import nearest

if TYPE_CHECKING:
    from slime_core.weights.tables.shape import ModelShape

# Megatron option -> field of ModelShape. They follow from config.json and are only compared.
_FROM_MODEL = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_size",
    "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
    "norm_epsilon": "norm_eps",
    "layernorm_epsilon": "norm_eps",
    "rotary_base": "rope_theta",
    "rope_scaling_factor": "rope_factor",
}
# Options whose only possible value follows from what the trainer builds.
_FIXED = {
    "swiglu": True,
    "gated_linear_unit": True,
    "disable_bias_linear": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "use_rotary_position_embeddings": True,
    "no_position_embedding": True,
    "tokenizer_type": "HuggingFaceTokenizer",
    "ckpt_format": "torch_dist",
    "override_opt_param_scheduler": True,  # the configuration decides after a resume, too
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "apply_layernorm_1p": False,
    "layernorm_zero_centered_gamma": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_distributed_optimizer": True,
    "optimizer": "adam",
    "overlap_param_gather": False,  # weights are read right after a step
    "transformer_impl": "local",
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "num_experts": None,
    "num_moe_experts": None,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "virtual_pipeline_model_parallel_size": None,
    "fp16": False,
    # A step whose loss or gradients are not finite is skipped and recorded; it never ends the run.
    "no_check_for_nan_in_loss_and_grad": True,
    "check_for_nan_in_grad": False,
}
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# A flag that switches something off: option -> (field, value).
_NEGATIONS = {
    "no_rope_fusion": ("apply_rope_fusion", False),
    "no_masked_softmax_fusion": ("masked_softmax_fusion", False),
    "no_bias_swiglu_fusion": ("bias_activation_fusion", False),
    "no_bias_dropout_fusion": ("bias_dropout_fusion", False),
    "no_gradient_accumulation_fusion": ("gradient_accumulation_fusion", False),
    "no_persist_layer_norm": ("persist_layer_norm", False),
    "accumulate_allreduce_grads_in_fp32": ("grad_reduce_in_fp32", True),
}
_RENAMED = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
# Accepted because launch scripts carry them; they cannot change anything here.
_WITHOUT_EFFECT = frozenset(
    {
        "attention_backend",
        "attention_softmax_in_fp32",
        "group_query_attention",
        "seq_length",
        "use_mcore_models",
        "log_interval",
        "cross_entropy_loss_fusion",
    }
)
# Options with a place of their own in the configuration tree.
_ELSEWHERE = {
    "calculate_per_token_loss": "algorithm.calculate_per_token_loss",
    "clip_grad": "train.clip_grad",
    "global_batch_size": "train.global_batch_size",
    "load": "rollout.hf_checkpoint, or resume",
    "lr": "train.lr",
    "micro_batch_size": "train.micro_batch_size",
    "save": "store.store_url",
    "save_interval": "train.save_interval",
    "seed": "run.seed",
    "train_iters": "run.num_rollout",
}
_SETTINGS = frozenset(
    {
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "context_parallel_size",
        "expert_model_parallel_size",
        "lr_decay_iters",
        "lr_decay_style",
        "lr_warmup_init",
        "lr_warmup_iters",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_style",
        "make_vocab_size_divisible_by",
        "min_lr",
        "pipeline_model_parallel_size",
        "sequence_parallel",
        "tensor_model_parallel_size",
        "weight_decay",
    }
)
# Set by the trainer itself; not a user's choice.
_INTERNAL = frozenset(
    {
        "finalize_model_grads_func",
        "grad_scale_func",
        "grad_sync_func",
        "no_sync_func",
        "param_sync_func",
        "timers",
        "_cpu_offloading_context",
        "activation_func",
        "init_method",
        "output_layer_init_method",
        "embedding_init_method",
        "params_dtype",
        "pipeline_dtype",
        "autocast_dtype",
        "enable_autocast",
        "perform_initialization",
        "use_cpu_initialization",
        "variable_seq_lengths",
        "average_in_collective",
    }
)
_SWITCHES = frozenset(
    {
        "bf16",
        "qk_layernorm",
        "add_qkv_bias",
        "untie_embeddings_and_output_weights",
        "use_rope_scaling",
    }
)
# Types of options whose value is compared or ignored, where it is not bool.
_TEXTS = frozenset({"attention_backend", "distributed_backend"})
_NUMBERS = frozenset({"norm_epsilon", "layernorm_epsilon", "rotary_base", "rope_scaling_factor"})
_COUNTS = frozenset({"seq_length", "log_interval", *_FROM_MODEL} - _NUMBERS)
# Names known without asking Megatron, whose import takes seconds.
_MAPPED_HERE = (
    _SWITCHES
    | _FROM_MODEL.keys()
    | _FIXED.keys()
    | _NEGATIONS.keys()
    | _RENAMED.keys()
    | _WITHOUT_EFFECT
    | _SETTINGS
    | {"distributed_backend"}
)


@dataclasses.dataclass(frozen=True)
class ResolvedOptions:
    """Where the options went.

    Attributes:
        settings: the trainer's settings with the options that are its fields.
        transformer, optimizer, ddp: further fields of TransformerConfig, OptimizerConfig and
            DistributedDataParallelConfig.
        without_effect: accepted options that change nothing here.
    """

    settings: TrainerSettings
    transformer: dict[str, Any]
    optimizer: dict[str, Any]
    ddp: dict[str, Any]
    without_effect: tuple[str, ...]


Fields = Mapping[str, Mapping[str, Any]]


def known_names(classes: Fields | None = None) -> frozenset[str]:
    """Every option name that can stand in `megatron` (some only with one value)."""
    names = set(_MAPPED_HERE)
    for fields in (classes or declared_fields()).values():
        names |= set(fields)
    return frozenset(names - _INTERNAL - set(_ELSEWHERE))


def place_of(name: str) -> str | None:
    """What decides about an option of Megatron's that cannot be given here; None for all others."""
    return "the trainer itself" if name in _INTERNAL else _ELSEWHERE.get(name)


def option_type(name: str) -> Any:
    """The type that an option takes, for reading it from text. `name` has underscores."""
    if name in _TEXTS:
        return str
    if name in _NUMBERS:
        return float
    if name in _COUNTS:
        return int
    if name in _WITHOUT_EFFECT:
        return bool
    if _FIXED.get(name) is not None:
        return type(_FIXED[name])
    return _type_of(name, None)


def check_names(options: Mapping[str, Any], classes: Fields | None = None) -> None:
    """Refuses unknown names and wrong types, without knowing the model.

    Args:
        classes: Megatron's classes with their fields; by default as they are declared.

    Raises:
        ConfigError: names the option and the nearest known one, or the place it belongs to.
    """
    for given, value in options.items():
        name = _normal(given)
        if place := place_of(name):
            raise ConfigError(f"megatron option {given!r} is set by {place}")
        if name not in _MAPPED_HERE and name not in known_names(classes):
            near = nearest(name, known_names(classes))
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"unknown megatron option {given!r}{hint}")
        if name in _FIXED:
            if value != _FIXED[name]:
                raise ConfigError(
                    f"megatron option {given!r} is {value!r}, the trainer supports "
                    f"{_FIXED[name]!r} only"
                )
        elif name not in _FROM_MODEL and name not in _WITHOUT_EFFECT:
            check_type(given, value, _type_of(name, classes))
            refuse_unsupported(given, name, value)
            check_bounds(given, name, value)


def resolve(
    settings: TrainerSettings, shape: ModelShape, classes: Fields | None = None
) -> ResolvedOptions:
    """Sorts `settings.megatron` into the places that use it and compares it with the model.

    Args:
        classes: Megatron's classes with their fields; by default the imported ones.

    Raises:
        ConfigError: an unknown name, a wrong type, or a value that contradicts config.json.
    """
    classes = classes or _megatron_fields()
    check_names(settings.megatron, classes)
    own: dict[str, Any] = {}
    by_class: dict[str, dict[str, Any]] = {name: {} for name in classes}
    without_effect = []
    for given, value in settings.megatron.items():
        name = _normal(given)
        if _follows_from_model(given, name, value, shape) or name in _FIXED:
            continue
        if name == "distributed_backend":
            _check_backend(given, value, settings.device)
        elif name in _WITHOUT_EFFECT:
            without_effect.append(given)
        elif name == "bf16":
            own["dtype"] = "bfloat16" if value else "float32"
        elif name in _SETTINGS:
            own[name] = value
        else:
            target, wanted = _NEGATIONS.get(name, (_RENAMED.get(name, name), value))
            if name in _NEGATIONS and (not value or target in _FIXED):
                continue
            for class_name, fields in classes.items():
                if target in fields:
                    by_class[class_name][target] = _value_for(fields[target], wanted)
    return ResolvedOptions(
        settings=dataclasses.replace(settings, **own),
        transformer=by_class["TransformerConfig"],
        optimizer=by_class["OptimizerConfig"],
        ddp=by_class["DistributedDataParallelConfig"],
        without_effect=tuple(without_effect),
    )


def _normal(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


@cache
def _megatron_fields() -> dict[str, dict[str, Any]]:
    """Class name -> field name -> type, read from the installed Megatron."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    found = {}
    for config in classes:
        hints = typing.get_type_hints(config)
        found[config.__name__] = {f.name: hints[f.name] for f in dataclasses.fields(config)}
    return found


def _type_of(name: str, classes: Fields | None) -> Any:
    if name in _NEGATIONS or name in _SWITCHES:
        return bool
    if name in _TEXTS:
        return str
    if name in _SETTINGS:
        return typing.get_type_hints(TrainerSettings)[name]
    if name in _RENAMED:
        return int
    for fields in (classes or declared_fields()).values():
        if name in fields:
            return fields[name]
    return Any


def _check_backend(given: str, value: str, device: str) -> None:
    if value != _BACKENDS[device]:
        raise ConfigError(
            f"megatron option {given!r} is {value!r}, but trainer ranks on {device} talk through "
            f"{_BACKENDS[device]}: remove the option, or change the device"
        )


def _value_for(expected: Any, value: Any) -> Any:
    """Dtypes are given by name."""
    if getattr(expected, "__module__", "") != "torch":
        return value
    import torch

    return getattr(torch, value) if expected is torch.dtype else value


def _follows_from_model(given: str, name: str, value: Any, shape: ModelShape) -> bool:
    """Compares an option that config.json decides. True if it is one."""
    if name in _FROM_MODEL:
        actual: Any = getattr(shape, _FROM_MODEL[name])
    elif name == "untie_embeddings_and_output_weights":
        actual = not shape.tied
    elif name == "qk_layernorm":
        actual = has_parameter(shape, "self_attention.q_layernorm.weight")
    elif name == "add_qkv_bias":
        actual = has_parameter(shape, "self_attention.linear_qkv.bias")
    elif name == "use_rope_scaling":
        actual = shape.rope_type == "llama3"
    else:
        return False
    if value != actual:
        raise ConfigError(
            f"megatron option {given!r} is {value!r}, but the model's config.json makes it "
            f"{actual!r}; remove the option or change the model"
        )
    return True


def has_parameter(shape: ModelShape, suffix: str) -> bool:
    """True if the family's layers have a parameter with this name."""
    from slime_core.weights.tables import table_for

    return any(entry.megatron.endswith(suffix) for entry in table_for(shape.model_type))
