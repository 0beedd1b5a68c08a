"""Whole rollout functions in upstream's style through the real worker, unmodified."""

import asyncio
from typing import Any

import pytest

from slime_core.errors import PluginError, RewardError
from slime_core.rollout.settings import EvalJob
from slime_core.store.documents import read_document
from tests.integration.rollout.places import Place
from tests.integration.rollout.test_data_sources import place_of

UPSTREAM = '''
"""A rollout function as upstream's examples have it: plain, with the helpers of slime."""
import asyncio
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, eval_rollout, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.types import Sample

async def collect(args, rollout_id, data_source):
    state = GenerateState(args)
    groups = data_source.get_samples(args.rollout_batch_size + 2)
    done = await asyncio.gather(*[
        generate_and_rm_group(args, group, sampling_params=state.sampling_params.copy(),
                              evaluation=False)
        for group in groups])
    return done

def generate_rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        output, _ = run(eval_rollout(args, rollout_id))
        return output
    done = run(collect(args, rollout_id, data_source))
    kept = done[1:args.rollout_batch_size + 1]
    back = done[-1]
    for sample in back:
        sample.status = Sample.Status.ABORTED
    data_source.add_samples([back])
    return RolloutFnTrainOutput(samples=kept, metrics={"rollout/mine": 3, "asked": len(done)})
'''

FOREIGN = """
from slime.utils.types import Sample

async def generate_rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        names = [d for d in ("greedy", "sampled")]
        return {name: {"rewards": [0.25, 0.75], "truncated": [False, True]} for name in names}
    groups = []
    for i in range(args.rollout_batch_size):
        group = []
        for j in range(args.n_samples_per_prompt):
            sample = Sample(prompt=f"{rollout_id}: {i}", tokens=[1, 2, 3], response_length=1,
                            response="x", rollout_log_probs=[-0.5], loss_mask=[1],
                            reward=float(j % 2), status=Sample.Status.COMPLETED)
            group.append([sample, Sample.from_dict({**sample.to_dict(), "reward": 0.5})])
        groups.append(group)
    return groups
"""

THREAD = '''
"""Requests from a thread and loop of its own, as fully asynchronous workers make them."""
import asyncio, threading
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group

def generate_rollout(args, rollout_id, data_source, evaluation=False):
    found = []
    def work():
        async def body():
            state = GenerateState(args)
            for group in data_source.get_samples(args.rollout_batch_size):
                found.append(await generate_and_rm_group(args, group, state.sampling_params))
        asyncio.run(body())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return RolloutFnTrainOutput(samples=found)
'''


def segments(place: Place, count: int) -> list[Any]:
    async def body() -> list[Any]:
        found = []
        for k in range(count):  # each by another owner: nothing but the store is remembered
            found.append(await place.segment(await place.ready(k), k, epoch=k))
        return found

    return asyncio.run(body())


def ends(seal: Any) -> dict[int, tuple[str, str | None]]:
    return {g.entry.group_id: (g.entry.verdict, g.entry.reason) for g in seal.groups}


def test_a_function_of_upstreams_makes_segments(tmp_path, url):
    place = place_of(tmp_path, url, UPSTREAM, rollout_function_path="PLUGIN:generate_rollout")
    first, second = segments(place, 2)
    kept = ("kept", None)
    assert ends(first) == {0: ("dropped", "rollout_function"), 1: kept, 2: kept, 3: kept, 4: kept,
                           5: ("aborted", None)}  # fmt: skip
    assert first.returned == ((5, 0),) and second.draws[0] == 5
    assert first.metrics == {"rollout/mine": 3.0, "rollout/asked": 6.0}
    before, after = place.rows(first)[5, "aborted"], place.rows(second)[5, "dropped"]
    assert before[0].response_length and after[0].prompt == before[0].prompt
    rows = [s for (_, v), group in place.rows(first).items() if v == "kept" for s in group]
    assert all(s.reward in (0.0, 1.0) and s.rollout_log_probs and s.weight_versions for s in rows)
    assert None not in place.graders(first)[4:20]


def test_samples_that_nobody_drew_are_logged_and_fan_out_shares_a_rollout(tmp_path, url):
    place = place_of(
        tmp_path, url, FOREIGN, rollout_function_path="PLUGIN", prompt_data=None,
        disable_rollout_global_dataset=True,
    )  # fmt: skip
    first, second = segments(place, 2)
    assert list(ends(first)) == [0, 1, 2, 3] and list(ends(second)) == [4, 5, 6, 7]
    assert first.rollouts == 16 and first.rows == 32
    group = place.rows(second)[4, "kept"]
    assert group[0].prompt == "1: 0" and group[0].index == 16
    assert [s.rollout_id for s in group] == [16, 16, 17, 17, 18, 18, 19, 19]
    assert [s.reward for s in group[:2]] == [0.0, 0.5]


def test_a_function_may_use_threads_and_loops_of_its_own(tmp_path, url):
    place = place_of(tmp_path, url, THREAD, rollout_function_path="PLUGIN:generate_rollout")
    (seal,) = segments(place, 1)
    assert list(ends(seal).values()) == [("kept", None)] * 4


@pytest.mark.parametrize(
    "path",
    [
        "slime.rollout.sglang_rollout.generate_rollout",
        "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "slime_core.rollout.slime_rollout:generate_rollout",
    ],
)
def test_slimes_own_functions_are_there_by_name(tmp_path, url, path):
    (seal,) = segments(Place(tmp_path, url, rollout_function_path=path), 1)
    assert [v for v, _ in ends(seal).values()] == ["kept"] * 4


def test_the_supervised_one_answers_from_the_data(tmp_path, url):
    path = "slime.rollout.sft_rollout.generate_rollout"
    place = Place(tmp_path, url, rollout_function_path=path, loss_type="sft_loss",
                  n_samples_per_prompt=1)  # fmt: skip
    (seal,) = segments(place, 1)
    rows = [s for group in place.rows(seal).values() for s in group]
    assert len(rows) == 4 and all(s.response == s.label and s.loss_mask for s in rows)


def test_it_also_evaluates_once_for_all_datasets(tmp_path, url):
    data = {"datasets": [{"name": n, "path": "configs/quickstart/heldout.jsonl@[0:2]"}
                         for n in ("greedy", "sampled")]}  # fmt: skip
    for text, reward in ((FOREIGN, 0.5), (UPSTREAM, None)):
        folder = tmp_path / str(reward)
        folder.mkdir()
        place = place_of(
            folder, url, text, rollout_function_path="PLUGIN:generate_rollout", eval_config=data,
            eval_interval=1,
        )  # fmt: skip

        async def body(place: Place = place) -> dict[str, Any]:
            worker = await place.ready()
            for name in ("greedy", "sampled"):
                await worker.evaluate(0, EvalJob(0, "l0-1", name))
            return {n: read_document(place.backend, f"evals/l0-1/{n}.json").body["metrics"]
                    for n in ("greedy", "sampled")}  # fmt: skip

        found = asyncio.run(body())
        assert found["greedy"]["samples"] == found["sampled"]["samples"] == 2
        if reward is not None:
            assert found["greedy"]["reward"] == reward
            assert found["greedy"]["truncated_ratio"] == 0.5


WRONG = """
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.utils.types import Sample
def few(args, rollout_id, data_source, evaluation=False):
    return data_source.get_samples(2)
def raises(args, rollout_id, data_source, evaluation=False):
    raise OSError("no server")
def foreign_back(args, rollout_id, data_source, evaluation=False):
    data_source.add_samples([[Sample(group_index=99)]])
def nothing(args, rollout_id, data_source, evaluation=False):
    return None
def aborted(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(4)
    groups[2][0].status = Sample.Status.ABORTED
    return RolloutFnTrainOutput(samples=groups)
def metrics(args, rollout_id, data_source, evaluation=False):
    return RolloutFnTrainOutput(samples=data_source.get_samples(4), metrics={"a": "high"})
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("few", "returned 2 groups, rollout_batch_size is 4"),
        ("raises", "raised OSError: no server"),
        ("foreign_back", "add_samples was given group 99, which get_samples did not give"),
        ("nothing", "returned None; a RolloutFnTrainOutput or a list"),
        ("aborted", "returned sample 8 of group 2 aborted; give its group back"),
        ("metrics", "the metric 'a' is 'high', no finite number"),
    ],
)
def test_what_is_wrong_with_a_function_is_one_sentence(tmp_path, url, name, says):
    place = place_of(tmp_path, url, WRONG, rollout_function_path=f"PLUGIN:{name}")
    with pytest.raises(PluginError, match=says):
        segments(place, 1)


def test_a_killed_call_is_repeated_with_the_same_prompts(tmp_path, url):
    text = UPSTREAM.replace("    done = run(", "    import os\n    done = run(").replace(
        "    kept = done[1", "    if not os.path.exists(__file__ + '.again'):\n"
        "        open(__file__ + '.again', 'w').close()\n        raise SystemError('killed')\n"
        "    kept = done[1",
    )  # fmt: skip
    place = place_of(tmp_path, url, text, rollout_function_path="PLUGIN:generate_rollout")
    with pytest.raises(PluginError, match="killed"):
        segments(place, 1)

    async def again() -> Any:
        return await place.segment(await place.ready(1), 0, epoch=1)

    seal = asyncio.run(again())
    assert sorted(ends(seal)) == [0, 1, 2, 3, 4, 5] and seal.draws == (0, 6)


def test_groups_that_stand_in_the_store_are_not_asked_for_again(tmp_path, url):
    """The first call makes three groups that can be trained and one that cannot."""
    text = (
        FOREIGN.replace("reward=float(j % 2)", "reward=worth(i, j)")
        .replace(
            "async def generate_rollout",
            """
import os

def worth(i, j):
    again = os.path.exists(__file__ + ".again")
    if i == 3 and j == 3:
        open(__file__ + ".again", "w").close()
    return float(j % 2) if again or i < 3 else float("nan")

async def generate_rollout""",
            1,
        )
        .replace('([sample, Sample.from_dict({**sample.to_dict(), "reward": 0.5})])', "(sample)")
    )
    place = place_of(
        tmp_path, url, text, rollout_function_path="PLUGIN:generate_rollout",
        reward_error_policy="drop",
    )  # fmt: skip
    with pytest.raises(RewardError, match="1 of the 4 groups"):
        segments(place, 1)

    async def again() -> Any:
        return await place.segment(await place.ready(1), 0, epoch=1)

    seal = asyncio.run(again())
    verdicts = [verdict for verdict, _ in ends(seal).values()]
    assert verdicts.count("kept") == 4 and len(verdicts) == 5, "one group was made anew, not four"


def test_a_thread_that_outlives_its_call_is_refused_draws_that_no_seal_would_name(tmp_path, url):
    late = """
import threading
RETURNED, SAID = threading.Event(), []

def take(data_source):
    RETURNED.wait(30)
    try:
        data_source.get_samples(1)
    except Exception as error:
        SAID.append(str(error))

def lasting(args, rollout_id, data_source, evaluation=False):
    if rollout_id:
        RETURNED.set()
        THREADS[0].join(30)
        assert "has returned" in SAID[0], SAID
    else:
        THREADS.append(threading.Thread(target=take, args=(data_source,), daemon=True))
        THREADS[0].start()
    return generate_rollout(args, rollout_id, data_source)

THREADS = []
"""
    place = place_of(tmp_path, url, THREAD + late, rollout_function_path="PLUGIN:lasting")

    async def body() -> list[Any]:
        worker = await place.ready()
        return [await place.segment(worker, k) for k in range(2)]

    first, second = asyncio.run(body())
    assert (first.draws, second.draws) == ((0, 4), (4, 8))
