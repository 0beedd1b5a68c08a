import asyncio
import copy

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import call_dynamic_filter
from slime.rollout.sglang_rollout import GenerateState, abort, eval_rollout
from slime.utils.async_utils import run
from slime.utils.misc import load_function
from slime.utils.types import Sample


async def generate_rollout_async(args, rollout_id: int, data_source):
    state = GenerateState(args)
    dynamic_filter = (
        load_function(args.dynamic_sampling_filter_path)
        if args.dynamic_sampling_filter_path is not None
        else None
    )
    target_data_size = args.rollout_batch_size
    data, aborted, dropped = [], [], 0
    while len(data) < target_data_size:
        while state.remaining_batch_size < target_data_size:
            samples = data_source.get_samples(args.over_sampling_batch_size or target_data_size)
            state.submit_generate_tasks(copy.deepcopy(samples))
        done, state.pendings = await asyncio.wait(
            state.pendings, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            group = task.result()
            assert len(group) == args.n_samples_per_prompt
            output = call_dynamic_filter(dynamic_filter, args, group)
            if not output.keep:
                state.remaining_batch_size -= 1
                dropped += 1
                continue
            if len(data) < target_data_size:
                data.append(group)
            else:
                aborted.append(group)
    await abort(args, rollout_id)
    for task in state.pendings:
        aborted.append(await task)
    for group in aborted:
        for sample in group:
            sample.status, sample.reward = Sample.Status.ABORTED, None
    data = sorted(data, key=lambda group: group[0].index)
    state.reset()
    return RolloutFnTrainOutput(samples=data, metrics={"dropped": dropped}), aborted


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        output, _ = run(eval_rollout(args, rollout_id))
        return output
    output, aborted = run(generate_rollout_async(args, rollout_id, data_source))
    data_source.add_samples(aborted)
    return output


def fixed_eval(args, rollout_id, data_source, evaluation=False):
    assert evaluation
    result = {"rewards": [1.0, 0.0], "truncated": [False, True], "samples": None}
    return RolloutFnEvalOutput(data={"greedy": result}, metrics={"eval/asked": rollout_id})
