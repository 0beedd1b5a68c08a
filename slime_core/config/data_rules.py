"""Rules about where prompts come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core.config.tree import RunConfig


def validate(config: RunConfig) -> str | None:
    """Every rule that is broken, a full sentence a line."""
    rules = (_prompts, _weights, _buffer)
    problems = [problem for rule in rules if (problem := rule(config))]
    return "\n".join(problems) or None


def _prompts(config: RunConfig) -> str | None:
    data = config.data
    if not data.disable_rollout_global_dataset:
        return None
    if not (config.rollout.rollout_function_path or config.debug.load_debug_rollout_data):
        return (
            "disable_rollout_global_dataset leaves prompts to a rollout function: set "
            "rollout_function_path"
        )
    if data.prompt_data or data.data_source_path:
        return (
            "disable_rollout_global_dataset draws no prompts, so prompt_data and data_source_path "
            "have no effect: leave them out"
        )
    return None


def _weights(config: RunConfig) -> str | None:
    weights, files = config.data.prompt_data_weights, config.data.prompt_data
    if weights is None:
        return None
    named = len(files) if isinstance(files, list) else 1
    if named != len(weights) or named < 2:
        return (
            f"prompt_data_weights has {len(weights)} weights and prompt_data names {named} files: "
            "give one weight for each of several files"
        )
    if any(weight <= 0 for weight in weights):
        return f"prompt_data_weights must be above 0, not {weights}: leave a file out instead"
    return None


def _buffer(config: RunConfig) -> str | None:
    rollout = config.rollout
    back = (
        rollout.partial_rollout
        or rollout.dynamic_sampling_filter_path is not None
        or rollout.rollout_function_path is not None
    )
    if rollout.buffer_filter_path is not None and not back:
        return (
            "buffer_filter_path chooses among groups that come back, and none can: set "
            "partial_rollout or dynamic_sampling_filter_path with over_sampling_batch_size, or "
            "leave it out"
        )
    return None
