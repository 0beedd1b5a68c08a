"""Whether a model can be cut for its ranks. Imports neither torch nor megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime_core.errors import ConfigError
from slime_core.megatron.settings import TrainerSettings
from slime_core.weights.tables import ModelShape


def check_divisible(
    settings: TrainerSettings, shape: ModelShape, transformer: Mapping[str, Any]
) -> None:
    """Compares the parallel sizes with the model.

    Args:
        transformer: further fields of TransformerConfig (ResolvedOptions.transformer).

    Raises:
        ConfigError: names the size and what it does not divide.
    """
    size = settings.tensor_model_parallel_size
    if shape.num_experts is None and settings.expert_model_parallel_size > 1:
        raise ConfigError(
            f"expert_model_parallel_size {settings.expert_model_parallel_size}: a "
            f"{shape.model_type} model has no experts, so use 1"
        )
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        if shape.num_experts is None and getattr(settings.algorithm, name):
            raise ConfigError(f"{name}: a {shape.model_type} model has no experts, so leave it out")
    widths = {"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads}
    if shape.expert_ffn_size is None:
        widths["intermediate_size"] = shape.ffn_size
    else:
        _check_experts(settings, shape, transformer)
    for name, value in widths.items():
        if value % size:
            raise ConfigError(
                f"tensor_model_parallel_size {size} does not divide the model's {name} {value}"
            )
    if settings.virtual_stages is not None:
        _check_virtual_stages(settings, shape, transformer)
        return
    stages = settings.pipeline_model_parallel_size
    uneven = any("pipeline_stage" in name for name in transformer)
    if shape.num_layers % stages and not uneven:
        raise ConfigError(
            f"the model's {shape.num_layers} layers cannot be dealt evenly to "
            f"pipeline_model_parallel_size {stages} stages; set the megatron options "
            "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
        )


def with_virtual_stages(
    settings: TrainerSettings, given: Mapping[str, int], shape: ModelShape
) -> TrainerSettings:
    """The settings with the number of virtual stages, however it was said.

    Args:
        given: options of Megatron's command line that say it in another way.

    Raises:
        ConfigError: layers cannot be dealt so, or the options contradict each other.
    """
    counts = {}
    if settings.virtual_pipeline_model_parallel_size is not None:
        counts["virtual_pipeline_model_parallel_size"] = settings.virtual_stages or 1
    for name, value in given.items():
        count = value
        if name == "num_layers_per_virtual_pipeline_stage":
            at_once = settings.pipeline_model_parallel_size * value
            if shape.num_layers % at_once and settings.pipeline_model_parallel_size > 1:
                raise ConfigError(
                    f"{name} {value} x pipeline_model_parallel_size "
                    f"{settings.pipeline_model_parallel_size} = {at_once} does not divide the "
                    f"model's {shape.num_layers} layers"
                )
            count = max(1, shape.num_layers // at_once)
        counts[name] = count
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} gives {count}" for name, count in counts.items())
        raise ConfigError(f"virtual pipeline stages of a rank: {said}; keep one of these options")
    for count in counts.values():
        return replace(settings, virtual_pipeline_model_parallel_size=count)
    return settings


def _check_virtual_stages(
    settings: TrainerSettings, shape: ModelShape, transformer: Mapping[str, Any]
) -> None:
    stages, virtual = settings.pipeline_model_parallel_size, settings.virtual_stages or 1
    if any("pipeline_stage" in name for name in transformer):
        raise ConfigError(
            f"{virtual} virtual pipeline stages a rank hold equally many layers each: leave "
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage out"
        )
    if shape.num_layers % (stages * virtual):
        raise ConfigError(
            f"the model's {shape.num_layers} layers cannot be dealt to "
            f"pipeline_model_parallel_size {stages} x virtual_pipeline_model_parallel_size "
            f"{virtual} = {stages * virtual} stages: use sizes whose product divides them"
        )
    if not transformer.get("overlap_p2p_comm", True) or transformer.get("batch_p2p_comm"):
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size {virtual} needs overlap_p2p_comm and no "
            "batch_p2p_comm: in batches the messages of two stages to each other are mixed up; "
            "leave both options out"
        )


def _check_experts(
    settings: TrainerSettings, shape: ModelShape, transformer: Mapping[str, Any]
) -> None:
    for name, size, of, value in (
        (
            "expert_model_parallel_size",
            settings.expert_model_parallel_size,
            "num_experts",
            shape.num_experts or 0,
        ),
        (
            "expert_tensor_parallel_size",
            settings.expert_tensor_size,
            "moe_intermediate_size",
            shape.expert_ffn_size or 0,
        ),
    ):
        if value % size:
            raise ConfigError(f"{name} {size} does not divide the model's {of} {value}")
    if settings.tensor_model_parallel_size > 1 and not settings.sequence_parallel:
        raise ConfigError(
            f"tensor_model_parallel_size {settings.tensor_model_parallel_size}: a model with "
            "experts needs sequence_parallel, too, or each token would reach its experts several "
            "times"
        )
    dispatcher = transformer.get("moe_token_dispatcher_type")
    if dispatcher == "allgather" and settings.pipeline_model_parallel_size > 1:
        raise ConfigError(
            "moe_token_dispatcher_type allgather cannot take packs of different lengths through a "
            f"pipeline of {settings.pipeline_model_parallel_size} stages: use alltoall"
        )
