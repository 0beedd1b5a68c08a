"""The engine that the contract tests talk to.

By default the embedded engine on the shipped tiny model. SLIME_TEST_ENGINE_URL names another
server of the same protocol that serves the same model, for example a real SGLang with LINGER on
its PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from slime_core.engines.client import EngineClient
from slime_core.engines.launcher import EngineProcess, engine_process, free_port
from slime_core.engines.protocol import GenerateRequest, GenerateResult
from slime_core.waits import apoll, within

MODEL_PATH = Path(__file__).parents[3] / "configs/quickstart/model"
PROMPT = [26, 23, 29, 22, 34]
"""The text 5281=, which the shipped model sorts."""
LONG = {"max_new_tokens": 240, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 3}
TEST_DEADLINE_S = 120.0
EXTERNAL_URL = os.environ.get("SLIME_TEST_ENGINE_URL", "")
LINGER = Path(__file__).parents[1] / "linger"
"""A folder for SGLang's PYTHONPATH: /slow_down then also delays the step after an answer."""

Scenario = Callable[[EngineClient, httpx.AsyncClient], Coroutine[Any, Any, None]]


@pytest.fixture(scope="session")
def model_path() -> Path:
    return MODEL_PATH


@pytest.fixture
def embedded_only() -> None:
    if EXTERNAL_URL:
        pytest.skip("this holds for the embedded engine only")


@pytest.fixture(scope="session")
def tolerance() -> float:
    """How far log-probs of one sequence may lie apart."""
    return 0.05 if EXTERNAL_URL else 1e-5


@pytest.fixture(scope="session")
def engine_url(tmp_path_factory) -> Iterator[str]:
    """One server for all tests; each leaves it running with the shipped weights."""
    if EXTERNAL_URL:
        yield EXTERNAL_URL
        return
    engine = start_engine(tmp_path_factory.mktemp("engine"), weight_version="default")
    yield engine.url
    engine.terminate(5)


@pytest.fixture
def own_engine(tmp_path, embedded_only) -> Iterator[Callable[..., EngineProcess]]:
    """Starts engines that a test may kill."""
    engines: list[EngineProcess] = []

    def start(**options) -> EngineProcess:
        folder = tmp_path / str(len(engines))
        engines.append(start_engine(folder, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()


def start_engine(folder: Path, wait: bool = True, threads: int = 1, **options) -> EngineProcess:
    engine = engine_process(
        "embedded", str(MODEL_PATH), free_port(), folder / "log", options, threads=threads
    )
    engine.start()
    if wait:
        engine.wait_healthy(240)
    return engine


@pytest.fixture
def play(engine_url) -> Callable[[Scenario], None]:
    """Runs an asynchronous scenario with a client and a bare HTTP client."""
    return lambda scenario: run_scenario(engine_url, scenario)


def run_scenario(url: str, scenario: Scenario) -> None:
    async def main() -> None:
        async with EngineClient(url) as client, bare_client(url) as http:
            await within("the scenario", TEST_DEADLINE_S, scenario(client, http))

    asyncio.run(main())


@asynccontextmanager
async def bare_client(url: str):
    limits = httpx.Limits(max_connections=400)
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=limits) as http:
        yield http


class InFlight:
    """A request that is known to have produced tokens and not to have ended."""

    def __init__(self, client: EngineClient, request: GenerateRequest) -> None:
        self.results: list[GenerateResult] = []
        self._begun = asyncio.Event()
        self._task = asyncio.create_task(self._read(client, request))

    async def _read(self, client: EngineClient, request: GenerateRequest) -> None:
        async for result in client.generate_stream(request):
            self.results.append(result)
            self._begun.set()

    async def begun(self) -> None:
        await within("the first token", 30, self._begun.wait())

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def result(self) -> GenerateResult:
        await within("the end of a request", 60, self._task)
        return self.results[-1]

    async def hang_up(self) -> None:
        """Drops the connection; also collects the error when the engine did so first."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def slowed(http: httpx.AsyncClient, step_s: float = 0.02):
    """Long enough steps that a request of 240 tokens is in flight for seconds."""
    await http.post("/slow_down", json={"forward_sleep_time": step_s})
    try:
        yield
    finally:
        await http.post("/slow_down", json={"forward_sleep_time": None})


async def in_flight(client: EngineClient, rid: str, **sampling: Any) -> InFlight:
    """Begins a stream. No two share an id: SGLang aborts it two seconds after a stream ended."""
    request = InFlight(client, GenerateRequest(PROMPT, LONG | sampling, rid))
    await request.begun()
    return request


async def requests_held(http: httpx.AsyncClient) -> int:
    """Requests inside the engine, running or waiting."""
    return (await http.get("/get_load")).json()[0]["num_reqs"]


async def until_idle(client: EngineClient, http: httpx.AsyncClient) -> None:
    """Waits until the engine holds no request."""

    async def idle() -> bool | None:
        return True if await requests_held(http) == 0 else None

    await apoll("the engine to be idle", 20, idle)


async def settled(awaitable: Awaitable[Any]) -> Any:
    return await within("a call", 60, awaitable)
