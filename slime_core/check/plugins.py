"""Graders by name and functions by import path."""

from __future__ import annotations

import inspect
from typing import Any

from slime_core.agents.generate import load_agent
from slime_core.check.findings import Findings
from slime_core.config.tree import RunConfig
from slime_core.data.custom_source import load_source, takes_dataset
from slime_core.evaluation.datasets import EvalDataset
from slime_core.plugins.load import check_signature, is_async, load
from slime_core.plugins.trainer_hooks import CALLS, load_trainer_hook
from slime_core.rewards.hub import BATCHED_NAMES
from slime_core.rewards.registry import BOXED, GRADERS, REWARD_NAMES, grader_named
from slime_core.rollout.bridge import what_changes
from slime_core.rollout.custom import load_generate
from slime_core.rollout.filters import load_filter
from slime_core.rollout.group import load_hook
from slime_core.rollout.log_hooks import asked, load_log_hook
from slime_core.rollout.returned import load_buffer_filter
from slime_core.rollout.source_of_run import own_source
from slime_core.rollout.whole import evaluation_path, load_rollout, training_path
from slime_core.stages.batch_hooks import load_batch_hook
from slime_core.tools.interface import load_tools
from slime_core.weights.sync.post_write import POST_WRITE, load_post_write

CONVERT = "custom_convert_samples_to_train_data_path"


def check_rewards(config: RunConfig, datasets: list[EvalDataset], findings: Findings) -> None:
    """Loads what grades samples, in training and in each evaluation dataset."""
    rewards = config.rewards
    chosen = [(rewards.custom_rm_path, rewards.rm_type)]
    chosen += [(dataset.custom_rm_path, dataset.rm_type) for dataset in datasets]
    for path, name in dict.fromkeys(chosen):
        if path:
            described = findings.attempt(
                lambda p=path: _function(p, rewards.group_rm), "custom_rm_path"
            )
        elif name is not None:
            described = findings.attempt(lambda n=name: check_grader(n))
        else:
            continue
        if described is not None:
            findings.fact("rewards", **{path or name or "rm_type": described})


def check_rollout(config: RunConfig, datasets: list[EvalDataset], findings: Findings) -> None:
    """Loads what answers prompts, looks at samples and chooses groups."""
    rollout = config.rollout
    paths = [rollout.generate_path]
    paths += [dataset.custom_generate_function_path for dataset in datasets]
    for path in dict.fromkeys(path for path in paths if path):
        form = findings.attempt(
            lambda p=path: load_generate(p).form, "custom_generate_function_path"
        )
        if form is not None:
            findings.fact("rollout", **{path: form})
    filter_path, buffer_path = rollout.dynamic_sampling_filter_path, rollout.buffer_filter_path
    findings.attempt(lambda: load_filter(filter_path), "dynamic_sampling_filter_path")
    findings.attempt(lambda: load_buffer_filter(buffer_path, None), "buffer_filter_path")
    training = training_path(rollout.rollout_function_path, config.debug.load_debug_rollout_data)
    evaluation = evaluation_path(config.eval.eval_function_path, training)
    for path in dict.fromkeys(path for path in (training, evaluation) if path):
        about = "rollout_function_path" if path == training else "eval_function_path"
        findings.attempt(lambda p=path: load_rollout(p), about)
    source = own_source(config)
    if source is not None:
        kind = findings.attempt(lambda: load_source(source), "data_source_path")
        if kind is not None:
            form = "(dataset, args)" if takes_dataset(kind, source) else "(args)"
            findings.fact("data", data_source_path=f"{source}, made with {form}")
    for path in rollout.rollout_sample_hook_path:
        findings.attempt(lambda p=path: load_hook(p), "rollout_sample_hook_path")
    removes = rollout.rollout_sample_filter_path
    findings.attempt(lambda: load_batch_hook(removes, "groups"), "rollout_sample_filter_path")
    process = config.rewards.custom_reward_post_process_path
    findings.attempt(lambda: load_batch_hook(process, "samples"), "custom_reward_post_process_path")
    convert = config.rewards.custom_convert_samples_to_train_data_path
    findings.attempt(lambda: load_batch_hook(convert, "samples"), CONVERT)
    for flag, path in asked(config).items():
        findings.attempt(lambda f=flag, p=path: load_log_hook(f, p), flag)
    written = config.sync.custom_update_weight_post_write_path
    if written is not None:
        findings.attempt(lambda: load_post_write(written), POST_WRITE)
    findings.attempt(lambda: load_tools(rollout.tool_paths), "tool_paths")
    if rollout.agent_path:
        agent = findings.attempt(lambda: load_agent(rollout.agent_path), "agent_path")
        if agent is not None:
            findings.fact("rollout", agent_path=f"{rollout.agent_path}{inspect.signature(agent)}")


def check_template(config: RunConfig, tokenizer: Any, findings: Findings) -> None:
    """Whether turns can be joined under the model's chat template, and what it would have changed
    of earlier ones."""
    rollout, data = config.rollout, config.data
    roles = ["tool"] if rollout.tool_paths and data.apply_chat_template else []
    roles = ["user"] if rollout.agent_path else roles
    kwargs = data.apply_chat_template_kwargs
    for role in roles if tokenizer is not None else ():
        change = findings.attempt(lambda r=role: what_changes(tokenizer, r, kwargs) or "")
        if change:
            findings.notes.append(f"{change}; rollouts keep every turn as it was sampled")


def check_trainer_hooks(config: RunConfig, findings: Findings) -> None:
    """Loads the functions that take the place of losses, advantages and corrections."""
    for flag in CALLS:
        path = getattr(config.algorithm, flag)
        if path is None:
            continue
        hook = findings.attempt(lambda f=flag, p=path: load_trainer_hook(f, p), flag)
        if hook is not None:
            findings.fact("algorithm", **{flag: f"{path}{inspect.signature(hook.function)}"})


def check_grader(name: str) -> str:
    """Describes a built-in grader.

    Raises:
        ConfigError: there is none of this name; names the known ones.
    """
    plain = name.strip().removeprefix(BOXED)
    if plain == "remote_rm":
        return "asks a server"
    grader = grader_named(plain)
    grader.check()
    return "needs a label" if grader.needs_label else "needs no label"


def label_needed(config: RunConfig) -> str | None:
    """The grader of the training if it cannot do without a label."""
    rewards = config.rewards
    own = rewards.custom_rm_path or config.rollout.generate_path
    if own or rewards.rm_type is None:
        return None
    grader = GRADERS.get(rewards.rm_type.removeprefix(BOXED))
    return grader.name if grader and grader.needs_label else None


def _function(path: str, group_rm: bool) -> str:
    function = load(path, BATCHED_NAMES if group_rm else REWARD_NAMES)
    call = ("args", "samples" if group_rm else "sample")
    check_signature(function, path, call, must_be_async=group_rm)
    kind = "async def" if is_async(function) else "def"
    return f"{kind} {getattr(function, '__name__', path)}{inspect.signature(function)}"
