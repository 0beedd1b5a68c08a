"""Engines that end, fail or lie while a stage needs them: repaired, within bounds, and named."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core.errors import DeadlineError, EngineError, TrainerError
from slime_core.run.context import RunContext
from slime_core.stages import engine_care
from slime_core.stages.engine_care import bring_weights, open_gate, with_engines
from tests.unit.stages.standins import Lab


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(engine_care, "WATCH_INTERVAL_S", 0.005)


@pytest.fixture
def ctx(tmp_path: Path) -> RunContext:
    return ready(tmp_path, 2)


def ready(tmp_path: Path, engines: int, **overrides: Any) -> RunContext:
    """A run whose engines serve the trainer's weights behind an open gate."""
    ctx = Lab(tmp_path, engines=engines, **overrides).start()

    async def body() -> None:
        await bring_weights(ctx)
        await open_gate(ctx)

    asyncio.run(body())
    return ctx


def process(ctx: RunContext, index: int) -> Any:
    return ctx.engines.engines[index].process


def refuse_to_start(ctx: RunContext, index: int) -> None:
    """From now on an engine does not come up any more."""
    spawn = ctx.engines.spawn

    def broken(which: int) -> Any:
        made, client = spawn(which)
        made.starts = which != index  # type: ignore[attr-defined]
        return made, client

    ctx.engines.spawn = broken


def work_until(ready_when: Callable[[], bool]) -> Awaitable[str]:
    """Work that needs what a test waits for."""

    async def work() -> str:
        async with asyncio.timeout(5.0):
            while not ready_when():
                await asyncio.sleep(0.001)
        return "done"

    return work()


def run(ctx: RunContext, ready_when: Callable[[], bool]) -> str:
    async def body() -> str:
        return await with_engines(ctx, work_until(ready_when))  # type: ignore[arg-type]

    return asyncio.run(body())


def test_work_that_needs_no_repair_gets_none(ctx):
    before = list(ctx.engines.urls)
    assert run(ctx, lambda: True) == "done"
    assert ctx.engines.urls == ctx.rollout.urls == before


def test_a_dead_engine_is_started_anew_with_the_served_weights_and_handed_back(ctx):
    old = process(ctx, 1).url
    process(ctx, 1).alive = False
    run(ctx, lambda: len(ctx.rollout.urls) == 2 and old not in ctx.rollout.urls)
    new = process(ctx, 1)
    assert new.url in ctx.rollout.urls and new.version == ctx.served
    assert new.weights == ctx.trainer.weights and len(ctx.engines.usable) == 2


def test_a_trainer_that_takes_turns_sleeps_whenever_engines_work(tmp_path):
    ctx = ready(tmp_path, 2, offload_train=True)
    log = ctx.trainer.log  # type: ignore[attr-defined]
    log.clear()
    seen: list[str] = []
    run(ctx, lambda: seen.extend(log) or True)
    assert seen == log == ["sleep"], "before any work"
    old = process(ctx, 1).url
    process(ctx, 1).alive = False
    run(ctx, lambda: len(ctx.rollout.urls) == 2 and old not in ctx.rollout.urls)
    assert log == ["sleep", "sleep", "canary", "sleep"], "a repair wakes it for a while"


def test_a_trainer_that_ended_asleep_is_left_to_the_next_training(tmp_path, caplog):
    ctx = ready(tmp_path, 2, offload_train=True)
    ctx.trainer.log.clear()  # type: ignore[attr-defined]
    ctx.trainer.tainted = True  # type: ignore[attr-defined]
    assert run(ctx, lambda: True) == "done"
    assert ctx.trainer.log == [] and "the next training builds it again" in caplog.text


def test_work_is_not_begun_where_the_trainer_cannot_sleep(tmp_path, monkeypatch):
    ctx = ready(tmp_path, 2, offload_train=True)

    async def invoke(*_: Any) -> None:
        raise TrainerError("no room")

    monkeypatch.setattr(ctx.trainer, "invoke", invoke)
    begun: list[bool] = []
    with pytest.raises(TrainerError, match="no room"):
        run(ctx, lambda: begun.append(True) or True)
    assert not begun


def test_a_trainer_that_does_not_take_turns_never_sleeps(ctx):
    old = process(ctx, 1).url
    process(ctx, 1).alive = False
    run(ctx, lambda: len(ctx.rollout.urls) == 2 and old not in ctx.rollout.urls)
    assert "sleep" not in ctx.trainer.log


def test_without_a_trainer_engines_keep_their_own_weights_under_the_version(tmp_path):
    ctx = ready(tmp_path, 2, debug_rollout_only=True)
    assert ctx.served == "l0-0" and ctx.rollout.urls == ctx.engines.urls
    assert [process(ctx, i).version for i in (0, 1)] == ["l0-0"] * 2
    ctx.trainer = None  # type: ignore[assignment]
    old = process(ctx, 1).url
    process(ctx, 1).alive = False
    run(ctx, lambda: len(ctx.rollout.urls) == 2 and old not in ctx.rollout.urls)
    assert process(ctx, 1).version == "l0-0"
    ctx.rollout.down = {process(ctx, 0).url: "it hung"}
    old = process(ctx, 0).url
    run(ctx, lambda: len(ctx.rollout.urls) == 2 and old not in ctx.rollout.urls)
    assert process(ctx, 0).version == "l0-0"


def test_an_engine_that_does_not_take_the_versions_name_is_left_to_the_next_repair(tmp_path):
    ctx = ready(tmp_path, 2, debug_rollout_only=True)
    process(ctx, 0).failing = {"set_weight_version"}
    outcome = asyncio.run(bring_weights(ctx))
    assert outcome.serving == ("engine-1",)
    assert ctx.engines.engines[0].quarantined == f"{process(ctx, 0).url} cannot be reached"
    assert asyncio.run(bring_weights(ctx)).serving == ("engine-0", "engine-1"), "started anew"
    assert len(ctx.engines.usable) == 2
    for index in (0, 1):
        process(ctx, index).failing = {"set_weight_version"}
    with pytest.raises(EngineError, match="none took the version's name"):
        asyncio.run(bring_weights(ctx))


def test_without_engines_there_is_nothing_to_bring(tmp_path):
    ctx = ready(tmp_path, 0, debug_train_only=True, load_debug_rollout_data="x")
    assert ctx.served == ctx.state.version and ctx.rollout.urls == []
    assert run(ctx, lambda: True) == "done"


def test_while_one_is_repaired_the_workers_use_the_others(ctx, monkeypatch):
    seen: list[list[str]] = []
    plain = ctx.rollout.set_engines

    async def set_engines(urls: list[str]) -> None:
        seen.append(list(urls))
        await plain(urls)

    monkeypatch.setattr(ctx.rollout, "set_engines", set_engines)
    process(ctx, 0).alive = False
    other = process(ctx, 1).url
    run(ctx, lambda: len(seen) >= 2)
    assert seen[0] == [other] and len(seen[1]) == 2


def test_an_engine_that_failed_a_request_but_proves_itself_is_pardoned_once(ctx):
    engine = ctx.engines.engines[0]
    url = engine.client.url
    ctx.rollout.down[url] = "broken pipe"
    run(ctx, lambda: not ctx.rollout.down)
    assert engine.client.url == url and (engine.restarts, engine.pardons) == (0, 1)
    assert url in ctx.rollout.urls

    marks: list[str] = []

    def failing_again() -> bool:
        if len(marks) == engine.pardons and engine.client.url == url:
            marks.append(url)
            ctx.rollout.down[url] = "again"
        return engine.client.url in ctx.rollout.urls and engine.client.url != url

    run(ctx, failing_again)
    assert len(marks) == 2 and engine.restarts == 1, "the second time in a stage it starts anew"


def test_a_hung_engine_is_started_anew(ctx):
    """It lives, but answers neither health checks nor the canary."""
    old = process(ctx, 1)
    old.failing = {"health", "score"}
    run(ctx, lambda: len(ctx.rollout.urls) == 2 and old.url not in ctx.rollout.urls)
    assert not old.alive and ctx.engines.engines[1].restarts == 1


def test_an_engine_that_missed_health_checks_but_answers_again_is_spared(ctx):
    engine = ctx.engines.engines[1]
    url = engine.client.url
    process(ctx, 1).failing = {"health"}
    run(ctx, lambda: engine.pardons == 1 and url in ctx.rollout.urls)
    assert engine.restarts == 0


def test_an_engine_with_other_weights_is_not_pardoned(ctx):
    engine = ctx.engines.engines[0]
    url = engine.client.url
    process(ctx, 0).weights = "something else"
    ctx.rollout.down[url] = "strange answers"
    run(ctx, lambda: url not in ctx.rollout.urls and len(ctx.rollout.urls) == 2)
    assert engine.client.weights == ctx.trainer.weights  # type: ignore[attr-defined]


def test_an_engine_that_a_sync_quarantined_is_repaired_at_the_next_stage(ctx):
    ctx.engines.quarantine("engine-1", "transfer: shape")
    old = process(ctx, 1).url
    run(ctx, lambda: len(ctx.rollout.urls) == 2 and old not in ctx.rollout.urls)
    assert len(ctx.engines.usable) == 2


def test_beyond_its_budget_an_engine_is_left_out_as_long_as_another_serves(tmp_path, caplog):
    ctx = ready(tmp_path, 2, engine_restarts=2)
    refuse_to_start(ctx, 1)
    process(ctx, 1).alive = False
    run(ctx, lambda: "is spent" in caplog.text)
    engine = ctx.engines.engines[1]
    assert engine.restarts == 2 and ctx.rollout.urls == [process(ctx, 0).url]
    assert "budget of 2 restarts a stage (engine_restarts) is spent" in (engine.quarantined or "")
    assert "port in use" in (engine.quarantined or ""), "and it says why it did not come up"


def test_without_any_engine_the_stage_ends_and_the_work_with_it(tmp_path):
    ctx = ready(tmp_path, 1, engine_restarts=1)
    refuse_to_start(ctx, 0)
    process(ctx, 0).alive = False
    ended = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(EngineError, match=r"no engine is left: engine-0: its budget of 1 restarts"):
        asyncio.run(with_engines(ctx, endless()))
    assert ended == [True]


def test_each_stage_has_a_budget_of_its_own(tmp_path):
    ctx = ready(tmp_path, 1, engine_restarts=1)
    for _ in range(3):
        old = process(ctx, 0).url
        process(ctx, 0).alive = False
        run(ctx, lambda old=old: ctx.rollout.urls not in ([], [old]))
    assert len(ctx.engines.usable) == 1


def test_an_engine_that_does_not_take_the_weights_after_its_restart_is_tried_again(ctx):
    spawn, made = ctx.engines.spawn, []

    def first_one_is_broken(index: int) -> Any:
        one, client = spawn(index)
        if not made:
            one.failing = {"score"}  # type: ignore[attr-defined]
        made.append(one)
        return one, client

    ctx.engines.spawn = first_one_is_broken
    process(ctx, 0).alive = False
    run(ctx, lambda: len(made) == 2 and made[1].url in ctx.rollout.urls)
    assert ctx.engines.engines[0].restarts == 2


def test_the_works_own_error_is_raised_as_it_is(ctx):
    async def fails() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        asyncio.run(with_engines(ctx, fails()))


def test_a_worker_too_busy_to_say_who_is_down_stops_nothing(ctx, monkeypatch):
    asked = []

    async def engines_down() -> dict[str, str]:
        asked.append(True)
        raise DeadlineError("waited 30 s for the rollout worker's engines_down")

    monkeypatch.setattr(ctx.rollout, "engines_down", engines_down)
    assert run(ctx, lambda: len(asked) > 1) == "done"


def test_bringing_weights_closes_the_gate_and_opening_it_lists_who_serves(ctx):
    ctx.trainer.weights = "weights 1"  # type: ignore[attr-defined]
    ctx.state.iterations = 1
    process(ctx, 1).failing = {"pause"}
    spawn = ctx.engines.spawn
    ctx.engines.spawn = lambda index: spawn(index)

    async def body() -> None:
        outcome = await bring_weights(ctx)
        assert outcome.serving == ("engine-0",)
        assert outcome.quarantined["engine-1"].startswith("quiet: ")
        assert not ctx.rollout.is_open and ctx.served == "l0-1"
        await open_gate(ctx)

    asyncio.run(body())
    assert ctx.rollout.is_open and ctx.rollout.urls == [process(ctx, 0).url]


def test_engines_that_all_refuse_the_weights_are_started_anew(tmp_path):
    ctx = ready(tmp_path, 2)
    for engine in ctx.engines.engines:
        engine.process.failing = {"score"}  # type: ignore[attr-defined]
    outcome = asyncio.run(bring_weights(ctx))
    assert outcome.serving == ("engine-0", "engine-1")
    assert [engine.restarts for engine in ctx.engines.engines] == [1, 1]


def test_weights_that_nobody_can_take_end_the_sync_within_the_budgets(tmp_path):
    ctx = ready(tmp_path, 1, engine_restarts=2)
    spawn, starts = ctx.engines.spawn, []

    def always_broken(index: int) -> Any:
        one, client = spawn(index)
        one.failing = {"score"}  # type: ignore[attr-defined]
        starts.append(one)
        return one, client

    ctx.engines.spawn = always_broken
    process(ctx, 0).failing = {"score"}
    with pytest.raises(EngineError, match="0 engines serve it, 1 are needed: engine-0: verify: "):
        asyncio.run(bring_weights(ctx))
    assert len(starts) == 2 and not ctx.rollout.is_open
