"""Rules about generation and rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.config.rollout import AGENT_GENERATE

if TYPE_CHECKING:
    from slime_core.config.tree import RunConfig

WITHOUT_LABEL = ("random", "ifeval", "ifbench", "remote_rm", "regex", "json_schema", "code",
                 "code_share", "reasoning_gym")  # fmt: skip


def validate(config: RunConfig) -> str | None:
    """Every rule that is broken, a full sentence a line."""
    rules = (
        _reward,
        _reward_options,
        _shaping,
        _convert,
        _sampling,
        _decoding,
        _length,
        _tools,
        _agent,
        _custom,
    )
    problems = [problem for rule in rules if (problem := rule(config))]
    return "\n".join(problems) or None


def _reward(config: RunConfig) -> str | None:
    rewards = config.rewards
    if rewards.rm_type is None and rewards.custom_rm_path is None:
        rollout, dumps = config.rollout, config.debug.load_debug_rollout_data
        if rollout.generate_path or rollout.rollout_function_path or dumps:
            return None  # they may set rewards themselves
        return "no reward is configured: set rm_type (such as exact_match) or custom_rm_path"
    if rewards.custom_rm_path is not None or rewards.rm_type is None:
        return None
    if rewards.rm_type.removeprefix("boxed_") in WITHOUT_LABEL or config.data.label_key is not None:
        return None
    if config.data.data_source_path is not None or config.rollout.rollout_function_path is not None:
        return None  # labels may come from there
    return f"the grader {rewards.rm_type} compares with a label: set label_key"


def _reward_options(config: RunConfig) -> str | None:
    rewards = config.rewards
    remote = (rewards.rm_type or "").removeprefix("boxed_") == "remote_rm"
    if remote and rewards.rm_url is None:
        return "rm_type remote_rm asks a reward server: set rm_url"
    if rewards.group_rm and rewards.custom_rm_path is None:
        return "group_rm hands groups to a function: set custom_rm_path"
    return None


def _shaping(config: RunConfig) -> str | None:
    rewards, limit = config.rewards, config.rollout.rollout_max_response_len
    if rewards.reward_shaping != "overlong":
        if rewards.overlong_buffer_len is not None:
            return "overlong_buffer_len has an effect only with reward_shaping overlong: set both"
        return None
    if rewards.overlong_buffer_len is None or rewards.overlong_buffer_len > limit:
        return (
            "reward_shaping overlong needs overlong_buffer_len, the tokens over which the penalty "
            f"grows: 1 to rollout_max_response_len ({limit}), not {rewards.overlong_buffer_len}"
        )
    return None


def _convert(config: RunConfig) -> str | None:
    rewards = config.rewards
    if rewards.custom_convert_samples_to_train_data_path is None:
        return None
    other = "custom_reward_post_process_path" if rewards.custom_reward_post_process_path else ""
    other = other or ("reward_shaping" if rewards.reward_shaping != "none" else "")
    if not other:
        return None
    return (
        f"custom_convert_samples_to_train_data_path makes the rewards of the batch itself, so "
        f"{other} would have no effect: leave one of them out"
    )


def _decoding(config: RunConfig) -> str | None:
    problems = []
    chosen = {"rollout_top_k": config.rollout.rollout_top_k, "eval_top_k": config.eval.eval_top_k}
    for name, value in chosen.items():
        if value is not None and value != -1 and value < 1:
            problems.append(f"{name} must be -1 (all tokens) or at least 1, not {value}")
    if not all(config.rollout.rollout_stop):
        problems.append(
            "rollout_stop has an empty text, which would end every response: leave it out"
        )
    return "\n".join(problems) or None


def _sampling(config: RunConfig) -> str | None:
    rollout = config.rollout
    begun, needed = rollout.over_sampling_batch_size, rollout.rollout_batch_size
    if begun is not None and begun < needed:
        return (
            f"over_sampling_batch_size {begun} is below rollout_batch_size {needed}: begin at "
            "least as many prompts as are trained"
        )
    own = rollout.rollout_function_path is not None  # it decides by itself what it begins
    if rollout.partial_rollout and (begun is None or begun == needed) and not own:
        return (
            "partial_rollout cuts off what is begun beyond rollout_batch_size: set "
            f"over_sampling_batch_size above {needed}"
        )
    if rollout.mask_offpolicy_in_partial_rollout and not rollout.partial_rollout:
        return "mask_offpolicy_in_partial_rollout has an effect only with partial_rollout: set both"
    chosen = rollout.partial_rollout or rollout.dynamic_sampling_filter_path is not None
    if begun is not None and begun > needed and not (chosen or own):
        return (
            "over_sampling_batch_size begins prompts that nothing would choose from: set "
            "dynamic_sampling_filter_path or partial_rollout too"
        )
    return None


def _length(config: RunConfig) -> str | None:
    prompt, context = config.data.rollout_max_prompt_len, config.rollout.rollout_max_context_len
    if prompt is not None and context is not None and prompt >= context:
        return (
            f"rollout_max_prompt_len {prompt} leaves no room for a response in "
            f"rollout_max_context_len {context}: make it at most {context - 1}"
        )
    return None


def _tools(config: RunConfig) -> str | None:
    if config.rollout.tool_paths and config.rollout.custom_generate_function_path is None:
        return (
            "tool_paths has an effect only with a generate function that calls tools: set "
            "custom_generate_function_path to slime_core.rollout.multiturn.generate"
        )
    return None


def _agent(config: RunConfig) -> str | None:
    rollout = config.rollout
    own = rollout.custom_generate_function_path
    if rollout.agent_path and own not in (None, AGENT_GENERATE):
        return (
            f"agent_path and custom_generate_function_path ({own}) both answer prompts: set one of "
            "them (a generate function opens sessions with slime_core.agents.generate.open_session)"
        )
    if own == AGENT_GENERATE and not rollout.agent_path:
        return f"{AGENT_GENERATE} lets an agent work: set agent_path"
    return None


def _custom(config: RunConfig) -> str | None:
    groups = (getattr(config, name) for name in type(config).model_fields)
    known = {name for group in groups for name in getattr(type(group), "model_fields", {})}
    clash = sorted(set(config.rollout.custom_config) & known)
    if clash:
        return f"custom_config holds {clash[0]}, which is a setting of its own: set it as such"
    return None
