"""Two engines that start with other weights than the trainer's, and the trainer itself."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from slime_core.cluster.engine_pool import EnginePool, PoolLimits
from slime_core.engines.client import EngineClient
from slime_core.engines.launcher import EngineProcess, engine_process, free_port
from slime_core.weights.sync.canary import CanaryReading, canary_tokens

MODEL = Path(__file__).parents[3] / "configs/quickstart/model"
START_S = 240.0
CALL_S = 240.0
sys.path.insert(0, str(Path(__file__).parents[3]))  # spawned processes inherit it


def changed_model(folder: Path, factor: float) -> str:
    """The shipped model with every weight scaled."""
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    scaled = {name: tensor * factor for name, tensor in tensors.items()}
    save_file(scaled, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory) -> str:
    return changed_model(tmp_path_factory.mktemp("models") / "other", 1.05)


@pytest.fixture(scope="module")
def pool(tmp_path_factory, other_model) -> Iterator[EnginePool]:
    """Two engines with the other model. A test may kill one; `whole` starts it again."""
    folder = tmp_path_factory.mktemp("engines")

    def spawn(index: int) -> tuple[EngineProcess, EngineClient]:
        log, options = folder / f"{index}.log", {"weight_version": "l0-1"}
        process = engine_process("embedded", other_model, free_port(), log, options)
        return process, EngineClient(process.url)

    engines = EnginePool(spawn, 2, PoolLimits(START_S, 100))
    engines.start()
    asyncio.run(engines.ready())
    yield engines
    asyncio.run(engines.close())


@pytest.fixture
def play(pool: EnginePool) -> Callable[[Callable[[], Any]], Any]:
    """Runs a scenario with two living engines and fresh connections."""

    async def whole(scenario: Callable[[], Any]) -> Any:
        for engine in pool.engines:
            if not engine.process.alive:
                await pool.restart(engine)
            engine.client = EngineClient(engine.process.url)
        try:
            return await scenario()
        finally:
            for engine in pool.engines:
                await engine.client.close()

    return lambda scenario: asyncio.run(whole(scenario))


class Trainer:
    """The real trainer of the shipped model, in a process of its own."""

    def __init__(self, processes: ProcessPoolExecutor) -> None:
        from tests.integration.sync import jobs

        self._processes, self._jobs = processes, jobs
        self._do(jobs.setup, {"hf_checkpoint": str(MODEL)})

    def reading(self) -> CanaryReading:
        tokens = canary_tokens(100, 256)
        return CanaryReading(tokens, tuple(self._do(self._jobs.call, "canary", list(tokens))))

    async def export(self, folder: str, version: str) -> Any:
        return await asyncio.to_thread(self._do, self._jobs.call, "export_hf", folder, version)

    async def buckets(self, most_bytes: int) -> list[str]:
        return await asyncio.to_thread(self._do, self._jobs.buckets, most_bytes)

    async def release(self) -> None:
        await asyncio.to_thread(self._do, self._jobs.release)

    def _do(self, job: Callable[..., Any], *args: Any) -> Any:
        return self._processes.submit(job, *args).result(CALL_S)


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        yield Trainer(processes)
