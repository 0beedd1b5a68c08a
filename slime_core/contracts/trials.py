"""One trial a kind of function: load it, call it as a run would, and say what came of it."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slime_core.agents.generate import load_agent
from slime_core.config.loading import load_config
from slime_core.config.rollout import AGENT_GENERATE
from slime_core.contracts.example import (
    GROUP,
    answered,
    draws,
    example_args,
    example_runtime,
    pending,
)
from slime_core.contracts.own_rows import ANSWERED, own_group
from slime_core.data.custom_source import CustomSource
from slime_core.data.source_classes import Dataset
from slime_core.data.sources import PromptSource, SourceSettings
from slime_core.errors import PluginError
from slime_core.plugins.load import is_async
from slime_core.plugins.trainer_hooks import CALLS, WITH_MODEL, load_trainer_hook
from slime_core.rewards.hub import RewardHub, RewardSettings
from slime_core.rewards.result import Score, ScoreFailure, ScoreResult, failed_before
from slime_core.rollout.custom import load_generate
from slime_core.rollout.filters import judge
from slime_core.rollout.group import load_hook
from slime_core.rollout.handed_out import HandedOut
from slime_core.rollout.log_hooks import CALLS as LOG_CALLS
from slime_core.rollout.log_hooks import tell
from slime_core.rollout.outcome import columns, unstorable
from slime_core.rollout.returned import load_buffer_filter, selected
from slime_core.rollout.seen_source import SeenSource
from slime_core.rollout.whole import WholeRollout, returned_groups
from slime_core.sample import Sample
from slime_core.stages.batch_hooks import converted_rows, processed_rewards, removed_rows
from slime_core.store.draws import Draw as Logged
from slime_core.tools.interface import load_tools
from slime_core.weights.sync.post_write import POST_WRITE, PostWrite

REWARDS: dict[str, dict[str, Any]] = {"custom_rm_path": {}, "group_rm": {"group_rm": True}}
TRIAL_S = 20.0
SLOW_S = 0.5
AGENT_TOKENS = 10_000


async def trial(name: str, path: str, config: str | None) -> list[str]:
    """Tries a function of a kind.

    Args:
        config: a configuration whose settings it gets as `args`; an example's without.

    Returns:
        What it did, a line each; advice begins with "note:".

    Raises:
        PluginError, DataError, ConfigError: what is wrong with it, in one sentence.
    """
    if name in CALLS:
        load_trainer_hook(name, path)  # says what does not fit before anything heavy is imported
        if name in WITH_MODEL:
            return ["its parameters fit; not called: it gets Megatron's objects, in a run only"]
        from slime_core.contracts.trainer_trials import trainer_trial

        return trainer_trial(name, example_args(config), path)
    if name in REWARDS:
        return await _graded(name, path, config)
    return await TRIALS[name](example_args(config), path)


async def _graded(name: str, path: str, config: str | None) -> list[str]:
    """Answers to the first prompt of the configuration, or of the example, and their worth."""
    args: Any = example_args(config)
    settings = RewardSettings(custom_rm_path=path, reward_key=args.reward_key,
                              reward_timeout_s=TRIAL_S, **REWARDS[name])  # fmt: skip
    hub = RewardHub(settings, args)
    own = None if config is None else own_group(load_config(config, {}))
    where, samples = own or ("", answered(0, [None] * GROUP))
    what = f"responses to {where} ({ANSWERED})" if own else "responses (right, wrong, empty, 15 kB)"
    begun_s = time.monotonic()
    try:
        with example_runtime(example_args(None)).active():
            results = await hub.score_group(samples)
    finally:
        await hub.close()
    each_s = (time.monotonic() - begun_s) / len(samples)
    keys = [result for result in results if _is_keyless_dict(result)]
    if len(keys) == len(results):
        return [f"note: it returns dicts: set reward_key ({keys[0].message})"]  # type: ignore
    for sample, result in zip(samples, results, strict=True):
        if isinstance(result, ScoreFailure):
            about = repr(sample.response[:40])
            raise PluginError(f"{path}, for the response {about}: {result.message}")
    shown = [result.value for result in results if isinstance(result, Score)]
    lines = [f"{len(shown)} {what} were worth {shown}"]
    if all(value == shown[0] for value in shown):
        lines.append("note: all are worth the same, so nothing can be learned from them")
    if each_s > SLOW_S:
        lines.append(f"note: one took {each_s:.1f} s")
    return lines


def _is_keyless_dict(result: ScoreResult) -> bool:
    return isinstance(result, ScoreFailure) and result.reason == "reward_key"


async def _generate(args: Any, path: str) -> list[str]:
    function = load_generate(path)
    runtime = example_runtime(args)
    rows = await function.run(runtime, pending())
    if problem := unstorable(rows):
        raise PluginError(f"{path} left rows that cannot be stored: {problem}")
    trained = [row.effective_response_length for row in rows]
    engine: Any = runtime.gate
    lines = [
        f"{function.form}; {GROUP} samples became {len(rows)} rows with {engine.requests} requests",
        f"response tokens {[row.response_length for row in rows]}, trained {trained}, "
        f"status {sorted({row.status.value for row in rows})}",
    ]
    if not any(trained):
        lines.append("note: no token is trained; is the loss_mask meant to be all 0?")
    if any(row.rollout_log_probs is None for row in rows):
        lines.append("note: without rollout_log_probs no correction for older weights is possible")
    return lines


async def _agent(args: Any, path: str) -> list[str]:
    args.agent_path, args.agent_timeout_s = path, min(args.agent_timeout_s, TRIAL_S)
    load_agent(path)
    runtime = example_runtime(args)
    runtime.sampling = replace(runtime.sampling, max_response_tokens=AGENT_TOKENS)
    rows = await load_generate(AGENT_GENERATE).run(runtime, pending())
    for row in rows:
        if failure := failed_before(row.metadata):
            raise PluginError(f"{failure.message} ({failure.reason})")
    turns = [row.metadata["round_number"] for row in rows]
    lines = [f"{GROUP} sessions became {len(rows)} rows with the turns {turns}, "
             f"worth {[row.reward for row in rows]}"]  # fmt: skip
    if any(row.reward is None for row in rows):
        lines.append("note: where it returns None, the configured grader decides")
    if len(rows) > GROUP:
        lines.append("note: it does not always go on from what was said, which begins rows anew")
    return lines


async def _sample_hook(args: Any, path: str) -> list[str]:
    hook = load_hook(path)
    samples = answered(0, [None] * GROUP)
    for sample in samples:
        found = hook(args, sample, rollout_id=0, evaluation=False)
        found = await found if is_async(hook) else found
        if found is not None and not isinstance(found, Sample):
            raise PluginError(f"{path} returned {found!r:.80}; a Sample or None is needed")
        if problem := unstorable([found or sample]):
            raise PluginError(f"{path} left a sample that cannot be stored: {problem}")
    return [f"called for {len(samples)} samples"]


async def _filter(args: Any, path: str) -> list[str]:
    lines = []
    for about, rewards in (("mixed", [1.0, 0.0, 0.0, 1.0]), ("all right", [1.0] * 4),
                           ("all wrong", [0.0] * 4)):  # fmt: skip
        verdict = judge(path, args, answered(0, rewards))
        reason = f" ({verdict.reason})" if verdict.reason else ""
        lines.append(f"a group that is {about} is {'kept' if verdict.keep else 'dropped'}{reason}")
    return lines


async def _buffer(args: Any, path: str) -> list[str]:
    select = load_buffer_filter(path, args)
    assert select is not None
    groups = {number: answered(number) for number in range(5)}
    picked, dropped = selected(select, groups, 3)
    lines = [f"asked for 3 of 5 groups it picked {len(picked)}: {picked}"]
    if dropped:
        lines.append(f"note: it took {dropped} out and did not return them: they are given up")
    return lines


async def _sample_filter(args: Any, path: str) -> list[str]:
    removed = removed_rows(path, args, [answered(0), answered(1)])
    return [f"{len(removed)} of {2 * GROUP} samples were taken out of the loss"]


async def _post_process(args: Any, path: str) -> list[str]:
    raw, rewards = processed_rewards(path, args, [*answered(0), *answered(1)])
    return [f"raw rewards {raw.tolist()} became {[round(r, 4) for r in rewards.tolist()]}"]


async def _convert(args: Any, path: str) -> list[str]:
    copies, stored = ([*answered(0), *answered(1)] for _ in range(2))
    raw = np.asarray([sample.reward for sample in stored], dtype=np.float64)
    made = converted_rows(path, args, copies, stored, raw, np.arange(len(stored)))
    shown = [round(reward, 4) for reward in made.rewards.tolist()]
    return [f"of {len(stored)} rows {len(made.left_out)} were left out and {len(made.masks)} got "
            "another mask", f"raw rewards {raw.tolist()} became {shown}"]  # fmt: skip


async def _log(flag: str, args: Any, path: str) -> list[str]:
    groups = [answered(0), answered(1)]
    samples = [one for group in groups for one in group]
    arguments = {
        "custom_rollout_log_function_path": (0, args, samples, {"my/metric": 1.0}, 2.5),
        "rollout_all_samples_process_path": (args, groups, SeenSource(None, 8)),
        "custom_eval_rollout_log_function_path": (
            0, args, {"held": columns(samples)}, {"reward": 0.5},
        ),
    }[flag]  # fmt: skip
    await tell(flag, path, arguments, TRIAL_S)
    return [f"it was told of {len(samples)} samples"]


async def _source(args: Any, path: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "example.jsonl"
        rows = [{"input": f"What is {i} + 25?", "label": str(i + 25)} for i in range(8)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = SourceSettings(label_key="label", n_samples_per_prompt=GROUP)
        dataset = Dataset(PromptSource(str(file), settings))
        source = CustomSource(path, args, dataset, GROUP)
        first = source.draw(3)
        state = first[-1].state_after
        want = [draw.samples[0].prompt for draw in source.draw(2)]
        again = CustomSource(path, args, dataset, GROUP)
        if state is None:
            again.replay([[Logged(i, 0, i, 0, draw.samples, None) for i, draw in enumerate(first)]])
        else:
            again.restore(state)
        got = [draw.samples[0].prompt for draw in again.draw(2)]
    if got != want:
        raise PluginError(
            f"{path} goes on with {got!r:.80} after a restart, not with {want!r:.80}: keep what it "
            "remembers in plain attributes, or give it state_dict and load_state_dict"
        )
    how = "its state is kept" if state is not None else "it is asked again for all that was drawn"
    return [f"5 groups of {GROUP} were drawn, such as {want[0]!r:.60}",
            f"after a restart it goes on with the same prompts ({how})"]  # fmt: skip


async def _rollout(args: Any, path: str) -> list[str]:
    rollout = WholeRollout.load(path, TRIAL_S)
    count = args.rollout_batch_size
    logged = draws(0, count)

    def further(asked: int) -> list[Any]:
        new = draws(len(logged), asked)
        logged.extend(new)
        return new

    source = HandedOut(logged[:], {}, {}, further, None, 8)
    found = await rollout.call(example_runtime(args), args, 0, source, evaluation=False)
    groups, metrics = returned_groups(found, count, path)
    lost = set(source.out) - {g[0].group_index for g in groups} - set(source.back)
    lines = [f"{len(source.out)} groups were drawn, {len(groups)} returned, {len(source.back)} "
             f"given back; metrics {metrics or 'none'}"]  # fmt: skip
    if lost:
        lines.append(f"note: {len(lost)} were neither returned nor given back: they are dropped")
    return lines


async def _tool(args: Any, path: str) -> list[str]:
    return [f"the model sees {json.dumps(tool.schema)}" for tool in load_tools([path]).values()]


async def _post_write(args: Any, path: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("config.json", "model.safetensors"):
            (Path(folder) / name).write_bytes(b"{}")
        engines = {"engine-0": "http://127.0.0.1:1"}
        await PostWrite(path, args, lambda: engines, TRIAL_S)(folder)
        left = sorted(file.name for file in Path(folder).iterdir())
    return [f"it was told of an empty checkpoint's folder, which holds {', '.join(left)} now"]


TRIALS: dict[str, Callable[[Any, str], Awaitable[list[str]]]] = {
    "custom_generate_function_path": _generate,
    "agent_path": _agent,
    "rollout_sample_hook_path": _sample_hook,
    "dynamic_sampling_filter_path": _filter,
    "buffer_filter_path": _buffer,
    "rollout_sample_filter_path": _sample_filter,
    "custom_reward_post_process_path": _post_process,
    "custom_convert_samples_to_train_data_path": _convert,
    "data_source_path": _source,
    "rollout_function_path": _rollout,
    "tool_paths": _tool,
    POST_WRITE: _post_write,
    **{flag: partial(_log, flag) for flag in LOG_CALLS},
}
