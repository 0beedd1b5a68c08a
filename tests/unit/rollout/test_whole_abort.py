"""Whole rollout functions that stop what they began, on an engine that answers some groups only."""

import asyncio
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slime_core.contracts.example import SETTINGS, CharTokenizer, draws, example_args
from slime_core.engines.protocol import Unread, parse_result
from slime_core.errors import PluginError
from slime_core.plugins.load import load
from slime_core.rewards.hub import RewardHub, RewardSettings
from slime_core.rollout import whole
from slime_core.rollout.generate import Sampling
from slime_core.rollout.group import GroupMaker
from slime_core.rollout.handed_out import HandedOut
from slime_core.rollout.runtime import Runtime
from slime_core.rollout.scoring import Scorer
from slime_core.rollout.whole import WholeRollout, WholeSegment
from slime_core.sample import Status
from slime_core.store.parts import ABORTED, DROPPED, KEPT, GroupRows

PLUGIN = str(Path(__file__).parents[2] / "plugins_for_slime/partial.py")
ANSWER, BEGINNING = "42<|im_end|>", "4"


class Engine:
    """Answers the groups below `whole` in order; others sample one token and wait until they are
    told to end."""

    url = "scripted"

    def __init__(self, whole: int, deaf_once: bool = False) -> None:
        self.whole, self.deaf = whole, deaf_once
        self.told = asyncio.Event()
        self.asked: list[int] = []

    @asynccontextmanager
    async def engine(self, samples: int, wait_s: float, **_: Any):
        yield self

    async def generate_batch(self, requests: Any) -> list[Any]:
        return [parse_result(await self._answer(len(self.asked) // 4)) for _ in requests]

    async def generate_unread(self, requests: Any) -> Unread:
        results = await self.generate_batch(requests)
        return Unread(lambda: results)

    async def generate_raw(self, body: Any) -> Any:
        return await self._answer(len(self.asked) // 4)

    async def _answer(self, group: int) -> Any:
        self.asked.append(group)
        if group >= self.whole:
            await self.told.wait()
        text, finish = (ANSWER, "stop") if group < self.whole else (BEGINNING, "abort")
        ids = CharTokenizer().encode(text)
        meta = {
            "finish_reason": {"type": finish}, "weight_version": "l0-1", "id": "r",
            "output_token_logprobs": [[-0.25, token, None] for token in ids],
        }  # fmt: skip
        return {"text": text, "output_ids": ids, "meta_info": meta}

    async def abort_all(self) -> None:
        if self.deaf:  # as if the requests were on their way
            self.deaf = False
        else:
            self.told.set()


class Writer:
    def __init__(self) -> None:
        self.rows: dict[int, GroupRows] = {}

    async def put(self, rows: GroupRows) -> None:
        self.rows[rows.group_id] = rows


def segment(path: str, engine_of: Any, before: Any = None, **rollout: Any):
    """One call of a function; returns what was stored, by group, and the source it drew from."""
    rollout |= {"over_sampling_batch_size": 6, "rollout_function_path": path}
    settings = {**SETTINGS, "rollout": {**SETTINGS["rollout"], **rollout}}
    args, writer, logged = example_args(settings), Writer(), draws(0, 0)

    def further(count: int) -> list[Any]:
        new = draws(len(logged), count)
        logged.extend(new)
        return new

    async def body() -> HandedOut:
        hub = RewardHub(RewardSettings(rm_type="exact_match"), args)
        source = HandedOut([], {}, {}, further)
        runtime = Runtime(args, CharTokenizer(), engine_of(), hub, Sampling(64, {}, 20.0),
                          lambda sample: sample.index or 0)  # fmt: skip
        one = WholeSegment(WholeRollout.load(path, 30.0), 0, 3, source, Scorer(hub), writer,
                           lambda groups: [], before)  # fmt: skip
        try:
            await one.run(runtime, args)
        finally:
            for worker in load(path).__globals__["WORKERS"] if before is not None else ():
                worker.running = False  # its call's thread would be waited for
            await hub.close()
        return source

    source = asyncio.run(body())
    return writer.rows, source


def ends(rows: dict[int, GroupRows]) -> dict[int, tuple[str, str | None]]:
    return {number: (one.verdict, one.reason) for number, one in rows.items()}


@pytest.mark.parametrize("deaf", [False, True])
def test_what_is_left_is_stopped_and_given_back_with_what_it_has(deaf):
    rows, _ = segment(PLUGIN, lambda: Engine(3, deaf), partial_rollout=True)
    kept, back = (KEPT, None), (ABORTED, None)
    assert ends(rows) == {0: kept, 1: kept, 2: kept, 3: back, 4: back, 5: back}
    for number in (3, 4, 5):
        for row in rows[number].samples:
            assert (row.response, row.status, row.reward) == (BEGINNING, Status.ABORTED, None)
            assert row.metadata["start_rollout_id"] == 0
    assert all(row.reward == 1.0 for row in rows[0].samples)


def test_without_partial_rollout_they_are_dropped_with_their_answers_as_slime_does():
    rows, _ = segment(PLUGIN, lambda: Engine(3))
    gone = (DROPPED, "rollout_function")
    assert [ends(rows)[number] for number in (3, 4, 5)] == [gone] * 3
    assert [row.response for row in rows[4].samples] == [BEGINNING] * 4


def test_what_a_filter_drops_is_stored_with_answers_rewards_and_reason(tmp_path):
    (tmp_path / "f.py").write_text(
        "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
        "def odd(args, samples, **kwargs):\n"
        "    keep = samples[0].group_index % 2 == 0\n"
        "    return DynamicFilterOutput(keep=keep, reason=None if keep else 'odd')\n"
    )
    rows, _ = segment(
        PLUGIN, lambda: Engine(6), dynamic_sampling_filter_path=f"{tmp_path / 'f.py'}:odd"
    )
    assert {number for number, end in ends(rows).items() if end[0] == KEPT} == {0, 2, 4}
    for number in (1, 3, 5):
        assert ends(rows)[number] == (DROPPED, "dynamic_filter/odd")
        assert [row.reward for row in rows[number].samples] == [1.0] * 4
        assert all(row.response for row in rows[number].samples)


CUT = """
async def careful(args, sample, sampling_params):
    return await ask(args, sample, sampling_params, careful=True)

async def careless(args, sample, sampling_params):
    return await ask(args, sample, sampling_params, careful=False)

async def ask(args, sample, sampling_params, careful):
    from slime.utils.http_utils import post
    from slime.utils.types import Sample
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    said = await post(url, {"input_ids": sample.tokens, "sampling_params": sampling_params,
                            "return_logprob": True})
    meta = said["meta_info"]
    pairs = meta["output_token_logprobs"]
    sample.append_response_tokens(
        tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs], text=said["text"])
    sample.status = Sample.Status.COMPLETED
    if careful and meta["finish_reason"]["type"] == "abort":
        sample.status = Sample.Status.ABORTED
    return sample
"""


@pytest.mark.parametrize(("name", "kept"), [("careful", BEGINNING), ("careless", None)])
def test_a_generate_function_that_takes_a_cut_answer_for_a_whole_one_begins_again(
    tmp_path, name, kept
):
    (tmp_path / "g.py").write_text(CUT)
    path = f"{tmp_path / 'g.py'}:{name}"
    rows, source = segment(
        PLUGIN, lambda: Engine(3), partial_rollout=True, custom_generate_function_path=path
    )
    assert [ends(rows)[number][0] for number in range(3)] == [KEPT] * 3
    assert sorted(source.back) == [3, 4, 5]
    texts = {row.response for number in (3, 4, 5) for row in source.back[number]}
    assert texts == {kept or ""}
    assert all(row.status is Status.ABORTED for group in source.back.values() for row in group)


def test_a_generate_function_cannot_abort_the_loop_that_calls_it(tmp_path):
    (tmp_path / "g.py").write_text(
        "from slime.rollout.sglang_rollout import GenerateState\n"
        "async def generate(args, sample, sampling_params):\n"
        "    GenerateState(args).aborted = True\n    return sample\n"
    )
    path = str(tmp_path / "g.py")
    settings = {**SETTINGS, "rollout": {**SETTINGS["rollout"],
                                        "custom_generate_function_path": path}}  # fmt: skip
    args = example_args(settings)

    async def body() -> None:
        hub = RewardHub(RewardSettings(rm_type="exact_match"), args)
        maker = GroupMaker(args, Scorer(hub))
        runtime = Runtime(args, CharTokenizer(), Engine(9), hub, Sampling(64, {}, 20.0),  # type: ignore[arg-type]
                          lambda sample: 0)  # fmt: skip
        await maker.finish(runtime, draws(0, 1)[0].samples, 0)

    with pytest.raises(PluginError, match="a generate function aborted the rollout"):
        asyncio.run(body())


def test_a_worker_thread_of_the_call_before_is_refused_and_named_instead_of_waited_for(monkeypatch):
    monkeypatch.setattr(whole, "FRUITLESS_S", 0.2)
    path = f"{PLUGIN}:generate_rollout_from_worker"
    rows, before = segment(path, lambda: Engine(99))
    assert list(ends(rows).values()).count((KEPT, None)) == 3
    with pytest.raises(PluginError, match=r"partial_rollout with over_sampling_batch_size"):
        segment(path, lambda: Engine(99), before)


DRAWING = """
import threading

def generate_rollout(args, rollout_id, data_source, evaluation=False):
    threading.Thread(target=data_source.get_samples, args=(1,), daemon=True).start()
    data_source.begun.wait(20)
    raise ValueError("no more")
"""


def test_a_draw_that_is_under_way_does_not_hold_the_loop(tmp_path):
    path = tmp_path / "f.py"
    path.write_text(DRAWING)
    begun, go_on = threading.Event(), threading.Event()
    ended: list[bool] = []

    def further(count: int) -> list[Any]:
        begun.set()
        ended.append(go_on.wait(20))
        return draws(0, count)

    async def body() -> None:
        source = HandedOut([], {}, {}, further)
        vars(source)["begun"] = begun
        args = example_args(SETTINGS)
        hub = RewardHub(RewardSettings(rm_type="exact_match"), args)
        runtime = Runtime(args, CharTokenizer(), Engine(9), hub, Sampling(64, {}, 20.0),  # type: ignore[arg-type]
                          lambda sample: 0)  # fmt: skip
        one = WholeSegment(WholeRollout.load(str(path), 30.0), 0, 3, source, Scorer(hub), Writer(),  # type: ignore[arg-type]
                           lambda groups: [])  # fmt: skip
        running = asyncio.create_task(one.run(runtime, args))
        while not source._closed:  # the function has raised, and the end waits for the draw
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(PluginError, match="no more"):
            await running
        await hub.close()
        with pytest.raises(PluginError, match="has returned"):
            source.get_samples(1)

    asyncio.run(body())
    assert ended == [True], "the loop went on while the draw did"


STOPPED = """
import threading
from slime.rollout.sglang_rollout import GenerateState
BEGUN, ENDED = threading.Event(), threading.Event()

def generate_rollout(args, rollout_id, data_source, evaluation=False):
    state = GenerateState(args)
    BEGUN.set()
    while not state.aborted:
        threading.Event().wait(0.001)
    ENDED.set()
"""


def test_a_function_whose_call_is_cancelled_learns_that_it_is_to_stop(tmp_path):
    path = tmp_path / "f.py"
    path.write_text(STOPPED)

    async def body() -> None:
        args = example_args(SETTINGS)
        runtime = Runtime(args, CharTokenizer(), Engine(9), None, Sampling(64, {}, 20.0),  # type: ignore[arg-type]
                          lambda sample: 0)  # fmt: skip
        whole = WholeRollout.load(str(path), 30.0)
        call = asyncio.create_task(whole.call(runtime, args, 0, None, evaluation=False))
        assert await asyncio.to_thread(load(f"{path}:BEGUN").wait, 20)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(body())
    assert load(f"{path}:ENDED").wait(20)
