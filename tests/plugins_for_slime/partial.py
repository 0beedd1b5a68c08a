"""A rollout loop that stops what is left once it has enough, and one that waits for a worker of its
own that lives in a thread."""

import asyncio
import queue
import threading
import time

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import call_dynamic_filter
from slime.rollout.sglang_rollout import GenerateState, abort, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.misc import load_function


async def collect(args, rollout_id, get_samples):
    state = GenerateState(args)
    dynamic_filter = None
    if args.dynamic_sampling_filter_path is not None:
        dynamic_filter = load_function(args.dynamic_sampling_filter_path)
    data = []
    while len(data) < args.rollout_batch_size:
        while state.remaining_batch_size < args.rollout_batch_size:
            state.submit_generate_tasks(get_samples(args.over_sampling_batch_size))
        done, state.pendings = await asyncio.wait(
            state.pendings, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            group = task.result()
            if not call_dynamic_filter(dynamic_filter, args, group).keep:
                state.remaining_batch_size -= 1
                continue
            if len(data) < args.rollout_batch_size:
                data.append(group)
    back = await abort(args, rollout_id)
    assert not state.pendings and GenerateState(args) is state
    state.reset()
    data.sort(key=lambda group: group[0].index)
    return RolloutFnTrainOutput(samples=data), back


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    output, back = run(collect(args, rollout_id, data_source.get_samples))
    data_source.add_samples(back)
    return output


class Worker:
    def __init__(self, args, data_source):
        self.done, self.wanted, self.running = queue.Queue(), 0, True
        self.args, self.data_source = args, data_source
        threading.Thread(target=lambda: asyncio.run(self.loop()), daemon=True).start()

    async def loop(self):
        state = GenerateState(self.args)
        while self.running:
            await asyncio.sleep(0.01)
            try:
                for group in self.data_source.get_samples(1) if self.wanted else []:
                    self.wanted -= 1
                    self.done.put(
                        await generate_and_rm_group(self.args, group, state.sampling_params)
                    )
            except Exception:
                continue  # and tries again


WORKERS = []


def generate_rollout_from_worker(args, rollout_id, data_source, evaluation=False):
    if not WORKERS:
        WORKERS.append(Worker(args, data_source))
    WORKERS[0].wanted += args.rollout_batch_size
    groups = []
    while len(groups) < args.rollout_batch_size and WORKERS[0].running:
        if WORKERS[0].done.empty():
            time.sleep(0.01)
        else:
            groups.append(WORKERS[0].done.get())
    return RolloutFnTrainOutput(samples=groups)
