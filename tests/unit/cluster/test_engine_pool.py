"""The engines of a run: who is usable, who gets the weights, and how restarts are counted."""

import asyncio
from typing import Any

import pytest

from slime_core.cluster.engine_pool import EnginePool, PoolLimits
from slime_core.errors import EngineError
from tests.unit.stages.standins import StandInEngine


def pool_of(size: int, restarts: int = 2) -> EnginePool:
    serial = iter(range(100))

    def spawn(index: int) -> Any:
        engine = StandInEngine(index, next(serial))
        return engine, engine

    pool = EnginePool(spawn, size, PoolLimits(1.0, restarts))
    pool.start()
    return pool


def test_engines_have_names_and_all_are_usable_at_first():
    pool = pool_of(3)
    asyncio.run(pool.ready())
    assert list(pool.clients()) == ["engine-0", "engine-1", "engine-2"]
    assert pool.urls == [f"http://engine-{i}/{i}" for i in range(3)]


def test_one_that_does_not_come_up_is_named():
    pool = pool_of(2)
    pool.engines[1].process.alive = False  # type: ignore[misc]
    with pytest.raises(EngineError, match=r"engine-1.* ended with status 2; port in use"):
        asyncio.run(pool.ready())


def test_a_quarantined_engine_gets_weights_and_no_requests():
    pool = pool_of(2)
    pool.quarantine("engine-0", "failed the canary")
    assert pool.urls == ["http://engine-1/1"] and list(pool.clients()) == ["engine-0", "engine-1"]
    pool.admit("engine-0")
    assert len(pool.urls) == 2


def test_a_dead_engine_gets_neither():
    pool = pool_of(2)
    pool.engines[0].process.alive = False  # type: ignore[misc]
    assert list(pool.clients()) == ["engine-1"]


def test_a_restarted_engine_has_a_new_address_and_stays_out_until_verified():
    pool = pool_of(1)
    engine = pool.engines[0]
    asyncio.run(pool.restart(engine))
    assert engine.process.url == "http://engine-0/1" and engine.process.alive
    assert engine.restarts == 1 and pool.urls == []


def test_a_restart_that_fails_is_repeated_within_the_budget_and_then_explained():
    pool = pool_of(1, restarts=3)
    spawn, made = pool.spawn, []

    def broken(index: int) -> Any:
        process, client = spawn(index)
        process.starts = len(made) == 2  # type: ignore[attr-defined]
        made.append(process)
        return process, client

    pool.spawn = broken
    engine = pool.engines[0]
    asyncio.run(pool.restart(engine))
    assert engine.restarts == 3 and engine.process.alive and not pool.can_restart(engine)
    with pytest.raises(EngineError, match=r"budget of 3 restarts a stage \(engine_restarts\)"):
        asyncio.run(pool.restart(engine))
    pool.renew_budgets()
    assert pool.can_restart(engine)


def test_closing_ends_every_process():
    pool = pool_of(2)
    processes = [engine.process for engine in pool.engines]
    asyncio.run(pool.close())
    assert not any(process.alive for process in processes) and pool.engines == []
