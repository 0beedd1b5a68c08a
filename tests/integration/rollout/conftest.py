"""Real engine processes in deterministic mode, and a group to generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime_core.engines.client import EngineClient
from slime_core.engines.launcher import EngineProcess, engine_process, free_port
from slime_core.waits import apoll

MODEL = Path(__file__).parents[3] / "configs/quickstart/model"
START_S = 240.0
OPTIONS = {"enable_deterministic_inference": True, "weight_version": "l0-1"}


def started(log: Path) -> EngineProcess:
    process = engine_process("embedded", str(MODEL), free_port(), log, OPTIONS)
    process.start()
    return process


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[[], EngineProcess]]:
    """Starts engines that a test may kill; call it for all of them before waiting for one."""
    processes: list[EngineProcess] = []

    def start() -> EngineProcess:
        processes.append(started(tmp_path / f"engine-{len(processes)}.log"))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture(scope="package")
def url(tmp_path_factory) -> Iterator[str]:
    """One engine for all tests that do not harm it."""
    process = started(tmp_path_factory.mktemp("engine") / "log")
    process.wait_healthy(START_S)
    yield process.url
    process.kill()


async def in_mid_generation(client: EngineClient) -> None:
    """Waits for requests to have some tokens, and freezes them there."""

    async def some_tokens() -> bool | None:
        load = (await client.server_info())["internal_states"][0]
        return True if load["running"] and load["tokens"] > 20 * load["running"] else None

    await apoll("requests to be in mid generation", 20.0, some_tokens, interval_s=0.002)
    await client.pause("in_place")
    assert (await client.server_info())["internal_states"][0]["running"], "they ended too early"
