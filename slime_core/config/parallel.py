"""How the trainer's ranks share the model, as Megatron's options say it.

The layout decides where numbers are computed, not which ones: it is operational, though Megatron's
other options are numeric, and a run may go on in another layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.config.tree import RunConfig

LAYOUT_OPTIONS = frozenset(
    {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "moe_token_dispatcher_type",
        "sequence_parallel",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
    }
)


def option_name(given: str) -> str:
    """A Megatron option as a field, however it was written."""
    return str(given).removeprefix("--").replace("-", "_")


def layout_of(megatron: Mapping[str, Any]) -> dict[str, Any]:
    """The options that place the model on ranks."""
    return {name: value for name, value in megatron.items() if option_name(name) in LAYOUT_OPTIONS}


def without_layout(megatron: Mapping[str, Any]) -> dict[str, Any]:
    """The options that can change a number."""
    return {
        name: value for name, value in megatron.items() if option_name(name) not in LAYOUT_OPTIONS
    }


def layout_problem(config: RunConfig) -> str | None:
    """Why the ranks that were asked for cannot be had, in a sentence; None where they can."""
    cluster = config.cluster
    layout = {option_name(name): value for name, value in layout_of(config.megatron).items()}
    ranks = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    if cluster.actor_num_nodes > 1:
        return (
            f"actor_num_nodes {cluster.actor_num_nodes}: trainer ranks on several machines are not "
            "there yet: use 1, and give the ranks by actor_num_gpus_per_node"
        )
    tensor = layout.get("tensor_model_parallel_size", 1)
    pipeline = layout.get("pipeline_model_parallel_size", 1)
    context = layout.get("context_parallel_size", 1)
    experts = layout.get("expert_model_parallel_size", 1)
    expert_tensor = layout.get("expert_tensor_parallel_size") or tensor
    sizes = (tensor, pipeline, context, experts, expert_tensor)
    if not all(type(size) is int and size > 0 for size in sizes):
        return None  # the check of Megatron's options says which type they have
    copy = tensor * pipeline * context
    if ranks % copy:
        return (
            f"tensor_model_parallel_size {tensor} x pipeline_model_parallel_size {pipeline} x "
            f"context_parallel_size {context} = {copy} ranks hold the model, but "
            f"actor_num_gpus_per_node is {ranks}: make it a multiple of {copy}"
        )
    if expert_tensor > tensor:
        return (
            f"expert_tensor_parallel_size {expert_tensor} is above tensor_model_parallel_size "
            f"{tensor}: ranks with other tokens would share an expert, which is not there yet; use "
            "at most that"
        )
    if ranks // pipeline % (experts * expert_tensor):
        return (
            f"expert_model_parallel_size {experts} x expert_tensor_parallel_size {expert_tensor} = "
            f"{experts * expert_tensor} ranks hold the experts of a layer, but "
            f"actor_num_gpus_per_node {ranks} gives each pipeline stage {ranks // pipeline}: make "
            "that a multiple"
        )
    return None
