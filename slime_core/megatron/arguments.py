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
from slime_core.megatron.divisible import with_virtual_stages
from slime_core.megatron.option_bounds import check_bounds
from slime_core.megatron.option_tables import (
    BACKENDS,
    COUNTS,
    ELSEWHERE,
    FIXED,
    FROM_MODEL,
    INTERNAL,
    NEGATIONS,
    NUMBERS,
    RENAMED,
    SETTINGS,
    SWITCHES,
    TEXTS,
    VIRTUAL_STAGES,
    WITHOUT_EFFECT,
)
from slime_core.megatron.option_types import check_type
from slime_core.megatron.settings import TrainerSettings
from slime_core.megatron.unsupported import refuse_unsupported
from slime_core.near import nearest

if TYPE_CHECKING:
    from slime_core.weights.tables.shape import ModelShape

# Names known without asking Megatron, whose import takes seconds.
_MAPPED_HERE = (
    SWITCHES
    | FROM_MODEL.keys()
    | FIXED.keys()
    | NEGATIONS.keys()
    | RENAMED.keys()
    | WITHOUT_EFFECT
    | SETTINGS
    | VIRTUAL_STAGES
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
    return frozenset(names - INTERNAL - set(ELSEWHERE))


def place_of(name: str) -> str | None:
    """What decides about an option of Megatron's that cannot be given here; None for all others."""
    return "the trainer itself" if name in INTERNAL else ELSEWHERE.get(name)


def option_type(name: str) -> Any:
    """The type that an option takes, for reading it from text. `name` has underscores."""
    if name in TEXTS:
        return str
    if name in NUMBERS:
        return float
    if name in COUNTS:
        return int
    if name in WITHOUT_EFFECT:
        return bool
    if FIXED.get(name) is not None:
        return type(FIXED[name])
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
        if name in FIXED:
            if value != FIXED[name]:
                raise ConfigError(
                    f"megatron option {given!r} is {value!r}, the trainer supports "
                    f"{FIXED[name]!r} only"
                )
        elif name not in FROM_MODEL and name not in WITHOUT_EFFECT:
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
    without_effect: list[str] = []
    stages: dict[str, int] = {}
    for given, value in settings.megatron.items():
        name = _normal(given)
        if _follows_from_model(given, name, value, shape) or name in FIXED:
            continue
        if name == "distributed_backend":
            _check_backend(given, value, settings.device)
        elif name in WITHOUT_EFFECT:
            without_effect.append(given)
        elif name == "bf16":
            own["dtype"] = "bfloat16" if value else "float32"
        elif name in SETTINGS:
            own[name] = value
        elif name in VIRTUAL_STAGES:
            stages[name] = value
        else:
            target, wanted = NEGATIONS.get(name, (RENAMED.get(name, name), value))
            if name in NEGATIONS and (not value or target in FIXED):
                continue
            for class_name, fields in classes.items():
                if target in fields:
                    by_class[class_name][target] = _value_for(fields[target], wanted)
    return ResolvedOptions(
        settings=with_virtual_stages(dataclasses.replace(settings, **own), stages, shape),
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
    if name in NEGATIONS or name in SWITCHES:
        return bool
    if name in TEXTS:
        return str
    if name in SETTINGS:
        return typing.get_type_hints(TrainerSettings)[name]
    if name in RENAMED or name in VIRTUAL_STAGES:
        return int
    for fields in (classes or declared_fields()).values():
        if name in fields:
            return fields[name]
    return Any


def _check_backend(given: str, value: str, device: str) -> None:
    if value != BACKENDS[device]:
        raise ConfigError(
            f"megatron option {given!r} is {value!r}, but trainer ranks on {device} talk through "
            f"{BACKENDS[device]}: remove the option, or change the device"
        )


def _value_for(expected: Any, value: Any) -> Any:
    """Dtypes are given by name."""
    if getattr(expected, "__module__", "") != "torch":
        return value
    import torch

    return getattr(torch, value) if expected is torch.dtype else value


def _follows_from_model(given: str, name: str, value: Any, shape: ModelShape) -> bool:
    """Compares an option that config.json decides. True if it is one."""
    if name in FROM_MODEL:
        actual: Any = getattr(shape, FROM_MODEL[name])
    elif name == "untie_embeddings_and_output_weights":
        actual = not shape.tied
    elif name == "qk_layernorm":
        actual = has_parameter(shape, "self_attention.q_layernorm.weight")
    elif name == "add_qkv_bias":
        actual = has_parameter(shape, "self_attention.linear_qkv.bias")
    elif name == "moe_router_pre_softmax":
        if shape.num_experts is None:
            return False
        actual = not shape.normalized_routing
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
