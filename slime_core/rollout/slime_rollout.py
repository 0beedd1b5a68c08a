"""slime's own rollout functions, for plug-ins that call or copy them.

Our loop (segment.py) is what a run uses by default; these do the same through a data source, as a
function of one's own would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from slime_core.errors import PluginError
from slime_core.rollout import sft
from slime_core.rollout.filters import judge
from slime_core.rollout.group_notes import note_answers, note_drop
from slime_core.rollout.runtime import current
from slime_core.rollout.slime_names import (
    GenerateState,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    batched_async_rm,
    begin_again,
    generate_and_rm,
    run,
)
from slime_core.sample import Sample, Status

Group = list[Sample]
EVALUATE = "evaluate"
MOST_DRAWS_PER_GROUP = 32
ABORT_AGAIN_S = 1.0


async def generate_and_rm_group(
    args: Any, group: Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Group:
    """Answers and grades a group; with group_rm all of it at once. Where the rollout is being
    stopped, samples come back aborted with what they have."""
    runtime = current()

    async def one(sample: Sample) -> Any:
        params = {**sampling_params, "sampling_seed": runtime.seed_of(sample)}
        return await generate_and_rm(args, sample, params, evaluation=evaluation)

    rows = list(await asyncio.gather(*(one(sample) for sample in group)))
    whole = all(row.status is not Status.ABORTED for row in rows)
    if getattr(args, "group_rm", False) and not evaluation and whole:
        rewards = await batched_async_rm(args, rows)
        for row, reward in zip(rows, rewards, strict=True):
            row.reward = reward
    note_answers(rows)
    return rows


async def generate_rollout_async(
    args: Any, rollout_id: int, data_source: Callable[[int], list[Group]]
) -> tuple[RolloutFnTrainOutput, list[Group]]:
    """Groups until rollout_batch_size of them are kept.

    Args:
        data_source: gives groups (the method get_samples of one).

    Returns:
        The kept groups by their numbers, and those that were begun in vain.

    Raises:
        PluginError: the filter drops so many that the batch does not fill.
    """
    state, target = GenerateState(args), args.rollout_batch_size
    left = MOST_DRAWS_PER_GROUP * target
    begun: dict[asyncio.Task[Group], Group] = {}
    kept: list[Group] = []
    drops: dict[str, float] = {}
    try:
        while len(kept) < target:
            missing = target - len(kept) - len(begun)
            if missing > 0:
                count = max(missing, getattr(args, "over_sampling_batch_size", None) or 0)
                left -= count
                if left < 0:
                    raise PluginError(
                        f"only {len(kept)} of {target} groups could be kept: the filter of "
                        "dynamic_sampling_filter_path drops too many, loosen it"
                    )
                for group in data_source(count):
                    work = generate_and_rm_group(args, group, state.sampling_params)
                    begun[asyncio.ensure_future(work)] = group
            done, _ = await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: begun[task][0].group_index or 0):
                del begun[task]
                group = task.result()
                verdict = judge(args.dynamic_sampling_filter_path, args, group)
                if not verdict.keep:
                    note_drop(group, verdict.reason)
                    name = f"rollout/dynamic_filter/drop_{verdict.reason or 'filtered'}"
                    drops[name] = drops.get(name, 0.0) + 1
                elif len(kept) < target:
                    kept.append(group)
                else:
                    begun[asyncio.ensure_future(_done(group))] = group
    finally:
        surplus = list(begun.values())
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
    kept.sort(key=lambda group: group[0].index or 0)
    return RolloutFnTrainOutput(samples=kept, metrics=drops or None), [_anew(g) for g in surplus]


async def eval_rollout(args: Any, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Any]]:
    """Our evaluation of every configured dataset.

    Raises:
        PluginError: outside of an evaluation.
    """
    evaluate = current().notes.get(EVALUATE)
    if evaluate is None:
        raise PluginError("eval_rollout can be called with evaluation=True only")
    return RolloutFnEvalOutput(data=await current().at_home(evaluate())), []


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """What slime does by default; surplus groups go back to the data source."""
    if evaluation:
        return run(eval_rollout(args, rollout_id))[0]
    output, surplus = run(generate_rollout_async(args, rollout_id, data_source.get_samples))
    if surplus:
        data_source.add_samples(surplus)
    return output


def generate_rollout_fully_async(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """The same: in synchronous training nothing is generated beside it.

    Raises:
        ValueError: it is called for an evaluation, as slime's is.
    """
    if evaluation:
        raise ValueError("this function does not evaluate; leave eval_function_path unset")
    output = generate_rollout(args, rollout_id, data_source)
    assert isinstance(output, RolloutFnTrainOutput)
    return output


def sft_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Supervised samples: what the data holds is the response (see sft.py).

    Raises:
        ValueError: it is called for an evaluation.
    """
    if evaluation:
        raise ValueError("supervised samples do not evaluate; leave eval_function_path unset")
    groups = data_source.get_samples(args.rollout_batch_size)

    async def told() -> list[Group]:
        return [[await sft.generate(args, one, {}) for one in group] for group in groups]

    return RolloutFnTrainOutput(samples=run(told()))


async def abort(args: Any, rollout_id: int) -> list[Group]:
    """Stops what was begun in this rollout: nothing is sent any more, what is in flight at the
    engines ends with what was sampled, and all of GenerateState's `pendings` come to their end.

    Returns:
        Under `partial_rollout` the groups of `pendings`, to be given back with add_samples;
        otherwise nothing, as slime does.
    """
    runtime, state = current(), GenerateState(args)
    state.aborted = True
    groups: list[Group] = []
    while True:  # bounded by the deadline of the whole call
        await runtime.at_home(runtime.gate.abort_all())
        if not state.pendings:
            return groups
        # A request that was on its way when the engines were told is ended by the next round.
        done, state.pendings = await asyncio.wait(state.pendings, timeout=ABORT_AGAIN_S)
        for group in [task.result() for task in done] if args.partial_rollout else []:
            for sample in group:
                if sample.response_length:
                    sample.metadata.setdefault("start_rollout_id", rollout_id)
            groups.append(group)


async def _done(group: Group) -> Group:
    return group


def _anew(group: Sequence[Sample]) -> Group:
    """A group as it was drawn: what was begun in vain begins again."""
    return [begin_again(sample) for sample in group]
