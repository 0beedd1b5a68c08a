"""Functions of the user's that block, exit, or wait for their turn."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from slime_core.agents.gateway import Gateway
from slime_core.errors import DeadlineError, PluginError
from slime_core.plugins.load import load
from slime_core.rewards.aside import AsideLoop
from slime_core.rewards.hub import RewardHub, RewardSettings
from slime_core.rollout.custom import load_generate
from slime_core.rollout.filters import judge
from slime_core.rollout.generate import Sampling
from slime_core.rollout.group import GroupMaker
from slime_core.rollout.loop_watch import LoopWatch
from slime_core.rollout.outcome import unstorable
from slime_core.rollout.runtime import Runtime
from slime_core.rollout.whole import WholeRollout
from slime_core.sample import Sample, Status
from slime_core.tools.interface import ToolCall, execute, load_tools
from slime_core.waits import Patience, apoll, current_patience
from tests.unit.rollout.scripted import Characters, Script


def prompts(count: int = 1) -> list[Sample]:
    return [Sample(group_index=0, index=i, prompt="q", tokens=[1]) for i in range(count)]


def runtime(script: Any = None, timeout_s: float = 20.0, **args: Any) -> Runtime:
    settings = {"max_turns": 1, "agent_path": None, "stage_timeout_s": 20.0, **args}
    return Runtime(
        SimpleNamespace(**settings), Characters(), script or Script(*"abcd"),  # type: ignore[arg-type]
        None, Sampling(99, {}, timeout_s), lambda sample: sample.index or 0,  # type: ignore[arg-type]
    )  # fmt: skip


PLAIN = """
import threading
from slime.utils.async_utils import run
from slime.utils.http_utils import post
from slime.utils.types import Sample

ALL_HERE = threading.Barrier(4)

def generate(args, sample, sampling_params, evaluation=False):
    ALL_HERE.wait(20)  # four block at once, and nobody else
    said = run(post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
                    {"input_ids": sample.tokens, "sampling_params": sampling_params}))
    pairs = said["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs],
                                  text=said["text"])
    sample.metadata["thread"] = threading.current_thread().name
    return sample

def custom_generate(args, samples, evaluation=False):
    return [generate(args, sample, {"max_new_tokens": 9}) for sample in samples]

def late(args, sample, sampling_params):
    raise StopIteration("no more")
"""


def test_plain_generate_functions_have_a_thread_each_and_reach_the_engines(tmp_path):
    (tmp_path / "g.py").write_text(PLAIN)
    function = load_generate(f"{tmp_path / 'g.py'}:generate")
    assert function.form == "def (in threads), called for each sample"
    from slime_core.plugins.upstream_args import ROUTER_HOST

    there = runtime(sglang_router_ip=ROUTER_HOST, sglang_router_port=1)
    rows = asyncio.run(function.run(there, prompts(4)))
    assert sorted(row.response for row in rows) == ["a", "b", "c", "d"]
    assert all(row.status is Status.COMPLETED and "generate" in row.metadata["thread"]
               for row in rows)  # fmt: skip
    whole = load_generate(f"{tmp_path / 'g.py'}:custom_generate")
    assert whole.per_list and whole.form == "def (in threads), called with each group"
    with pytest.raises(PluginError, match="StopIteration: no more"):
        asyncio.run(load_generate(f"{tmp_path / 'g.py'}:late").run(runtime(), prompts()))


MANY = """
import threading
ENTERED, ACTIVE, MOST, GO_ON = [], [], [], threading.Event()

def generate(args, sample, sampling_params):
    ENTERED.append(sample.index)
    ACTIVE.append(sample.index)
    GO_ON.wait(20)
    MOST.append(len(ACTIVE))
    ACTIVE.remove(sample.index)
    sample.append_response_tokens(tokens=[5], log_probs=[-1.0])
    return sample
"""


def test_as_many_plain_functions_run_at_once_as_there_are_places(tmp_path):
    path = tmp_path / "g.py"
    path.write_text(MANY)
    function = load_generate(str(path))
    entered, most, go_on = (load(f"{path}:{name}") for name in ("ENTERED", "MOST", "GO_ON"))

    async def body() -> None:
        there = runtime()
        there.threads = asyncio.Semaphore(2)
        task = asyncio.create_task(function.run(there, prompts(6)))

        async def two_are_in() -> bool | None:
            return len(entered) == 2 or None

        await apoll("two threads", 20.0, two_are_in, 0.001)
        for _ in range(20):
            await asyncio.sleep(0)
        go_on.set()
        await task

    asyncio.run(body())
    assert sorted(entered) == list(range(6)) and max(most) <= 2


BLOCKS = """
import threading
GO_ON = threading.Event()

async def generate(args, sample, sampling_params):
    GO_ON.wait(20)
    return sample
"""


def test_one_that_holds_the_event_loop_is_named_while_it_does(tmp_path, caplog):
    path = tmp_path / "g.py"
    path.write_text(BLOCKS)
    function = load_generate(str(path))
    go_on = load(f"{path}:GO_ON")

    async def body() -> set[tuple[str, str]]:
        watch = LoopWatch(0.05)

        def release() -> None:
            while not watch.told:
                threading.Event().wait(0.01)
            go_on.set()

        releases = threading.Thread(target=release, daemon=True)
        releases.start()
        await function.run(runtime(), prompts())
        watch.close()
        return watch.told

    with caplog.at_level("WARNING"):
        told = asyncio.run(body())
    assert told == {(str(path), "generate")}, "the loop's own work and this test are not blamed"
    [said] = [r.getMessage() for r in caplog.records if "held the event loop" in r.getMessage()]
    assert said.startswith(f"generate ({path}, line 6)") and "make it a plain `def`" in said


EXITS = """
import sys
async def generate(args, sample, sampling_params): sys.exit(3)
def plain(args, sample, sampling_params): exit()
def whole(args, rollout_id, data_source, evaluation=False): sys.exit(3)
async def awaited(args, rollout_id, data_source, evaluation=False): sys.exit(3)
def filter(args, samples): sys.exit("no")
def hook(args, sample, *, rollout_id, evaluation): sys.exit(3)
async def reward(args, sample): sys.exit(3)
def tool(code: str) -> str: exec(code)
async def async_tool(code: str) -> str: exec(code)
"""


def test_sys_exit_ends_a_call_and_never_the_process_or_its_loops(tmp_path):
    (tmp_path / "e.py").write_text(EXITS)
    at = lambda name: f"{tmp_path / 'e.py'}:{name}"  # noqa: E731

    async def body() -> None:
        for name in ("generate", "plain"):
            with pytest.raises(PluginError, match=rf"{name} called sys.exit\(.*it must return"):
                await load_generate(at(name)).run(runtime(), prompts())
        for name in ("whole", "awaited"):
            with pytest.raises(PluginError, match=r"called sys.exit\(3\)"):
                whole = WholeRollout.load(at(name), 20.0)
                await whole.call(runtime(), SimpleNamespace(), 0, None, evaluation=False)
        with pytest.raises(PluginError, match=r"called sys.exit\('no'\)"):
            judge(at("filter"), None, prompts())
        args = SimpleNamespace(
            custom_generate_function_path=None, dynamic_sampling_filter_path=None,
            rollout_sample_hook_path=[at("hook")], rollout_skip_special_tokens=False,
        )  # fmt: skip
        done = prompts()
        done[0].status = Status.COMPLETED
        with pytest.raises(PluginError, match=r"hook called sys.exit\(3\)"):
            await GroupMaker(args, None).answer(runtime(), done, 0, None)  # type: ignore[arg-type]
        aside = AsideLoop()
        reward = load(at("reward"))
        for _ in range(2):  # the thread of rewards is still there
            with pytest.raises(PluginError, match=r"called sys.exit\(3\)"):
                await aside.run(lambda: reward(None, None), 20.0)
        await aside.close()
        tools = load_tools([at("tool"), at("async_tool")])
        for name in tools:
            said = await execute(tools, ToolCall(name, {"code": "exit()"}), 20.0)
            assert said.startswith(f"error: PluginError: {name} called sys.exit()")

    asyncio.run(body())


STRANGE = """
import asyncio

class Silent(Exception):
    def __str__(self): raise ValueError("no text")

async def cancelled(args, *given):
    inner = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(inner.cancel)
    await inner

async def silent(args, *given): raise Silent
def plain(args, sample, sampling_params): raise Silent
async def stops(args, sample):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(60)
async def odd(args, sample): return {"score": 1.0, "more": object(), 3: Strange()}
async def listed(args, sample): return [1.0]
async def deep(args, sample):
    value = {}
    for _ in range(5000): value = {"in": value}
    return {"score": 1.0, "more": value}
async def good(args, sample): return 0.5
class Strange:
    def __repr__(self): raise ValueError
"""


def test_cancellations_and_errors_of_a_functions_own_cost_its_own_call(tmp_path):
    (tmp_path / "s.py").write_text(STRANGE)
    at = lambda name: f"{tmp_path / 's.py'}:{name}"  # noqa: E731
    wanted = {
        "cancelled": "cancelled raised CancelledError: something that it awaited was cancelled",
        "silent": "silent raised Silent: (its text raises an error itself)",
        "plain": "plain raised Silent: (its text raises an error itself)",
    }

    async def body() -> None:
        for name, says in wanted.items():
            with pytest.raises(PluginError) as error:
                await load_generate(at(name)).run(runtime(), prompts())
            assert str(error.value).endswith(says)
        outer = asyncio.ensure_future(load_generate(at("cancelled")).run(runtime(), prompts()))
        outer.cancel()  # from outside it stays what it is
        with pytest.raises(asyncio.CancelledError):
            await outer

    asyncio.run(body())


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("cancelled", "exception", "something that it awaited was cancelled"),
        ("silent", "exception", "Silent: (its text raises an error itself)"),
        ("stops", "exception", "the function ended the thread that it ran in"),
        ("listed", "not_a_number", "returned [1.0], which is not a number"),
        ("deep", "not_a_number", "returned a value that is nested too deeply"),
        ("odd", None, ""),
    ],
)
def test_a_strange_reward_costs_its_sample_and_the_next_one_is_graded(tmp_path, name, reason, says):
    (tmp_path / "s.py").write_text(STRANGE)

    async def body() -> tuple[Any, Any]:
        key = "score" if name in ("odd", "deep") else None
        path = f"{tmp_path / 's.py'}:{name}"
        settings = RewardSettings(custom_rm_path=path, reward_key=key, reward_timeout_s=20.0)
        hub = RewardHub(settings, None)
        result = await hub.score(prompts()[0])
        after = hub.variant(custom_rm_path=f"{tmp_path / 's.py'}:good", reward_key=None)
        good = await after.score(prompts()[0])
        await after.close()
        await hub.close()
        return result, good

    result, good = asyncio.run(body())
    assert good.number == 0.5
    if reason is None:
        assert result.value["score"] == 1.0 and set(result.value) == {"score", "more", "3"}
        row = prompts()[0]
        row.reward = result.value
        assert unstorable([row]) is None
    else:
        assert (result.reason, says in result.message) == (reason, True), result


WAITS = """
from slime_core.agents.generate import open_session
ORDER = []

async def generate(args, sample, sampling_params):
    async with open_session(sample, sampling_params) as session:
        ORDER.append(sample.index)
        await args.work(sample.index)
    rows = session.rows(1.0)
    return rows or sample
"""


def test_waiting_for_a_session_does_not_count_against_the_deadline(tmp_path):
    """Three samples share one place; each holds it until the deadline of the others would long
    have passed, had it not stood still."""
    (tmp_path / "g.py").write_text(WAITS)
    function = load_generate(str(tmp_path / "g.py"))
    waited: list[bool] = []

    async def body() -> None:
        there = runtime(timeout_s=5.0)
        there.gateway = Gateway("m", 1)
        patiences: dict[int, Patience] = {}

        async def work(index: int) -> None:
            patience = current_patience()
            assert patience is not None
            patiences[index] = patience
            waited.append(patience._clock.when() is not None)
            assert patience._left_s <= 5.0

        there.args.work = work
        await there.gateway.slots.acquire()
        run = asyncio.ensure_future(function.run(there, prompts(3)))

        async def all_wait() -> bool | None:
            return len(there.gateway.slots._waiters or ()) == 3 or None  # type: ignore[union-attr]

        await apoll("three to wait", 20.0, all_wait, interval_s=0.001)
        there.gateway.slots.release()
        rows = await run
        assert len(rows) == 3
        await there.gateway.close()

    asyncio.run(body())
    assert waited == [True] * 3


def test_a_pause_stops_the_clock_and_only_the_rest_counts_afterwards():
    """A loop whose time is turned by hand."""
    loop = asyncio.new_event_loop()
    now_s = [0.0]
    loop.time = lambda: now_s[0]  # type: ignore[method-assign]

    async def body() -> list[float | None]:
        patience, seen = Patience("work", 10.0), []

        async def work() -> None:
            now_s[0] = 4.0
            with patience.paused():
                seen.append(patience._clock.when())
                now_s[0] = 1000.0
                with patience.paused():
                    now_s[0] = 2000.0
                seen.append(patience._clock.when())
            seen.append(patience._clock.when())

        await patience.run(work())
        return seen

    try:
        assert loop.run_until_complete(body()) == [None, None, 2006.0]
    finally:
        loop.close()


def test_a_place_that_never_becomes_free_has_a_deadline_of_its_own(tmp_path):
    (tmp_path / "g.py").write_text(WAITS)
    function = load_generate(str(tmp_path / "g.py"))

    async def body() -> None:
        there = runtime(stage_timeout_s=0.05)
        there.gateway = Gateway("m", 1)
        await there.gateway.slots.acquire()
        with pytest.raises(DeadlineError, match="a place among the open sessions: raise agent_con"):
            await function.run(there, prompts())

    asyncio.run(body())


def test_work_that_takes_too_long_is_named_and_its_own_timeouts_stay_its_own():
    async def slow() -> None:
        await asyncio.Event().wait()

    async def own() -> None:
        raise TimeoutError("mine")

    async def body() -> None:
        with pytest.raises(DeadlineError, match="waited 0 s for g"):
            await Patience("g", 0.01).run(slow())
        with pytest.raises(TimeoutError, match="mine"):
            await Patience("g", 20.0).run(own())

    asyncio.run(body())
