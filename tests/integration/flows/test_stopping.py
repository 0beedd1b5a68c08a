"""Stops that come from outside: a cancel in Prefect where no worker brings it, and a wish."""

import asyncio
import os
import signal

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas import filters
from prefect.states import Cancelling

from flows import cancelled, stop
from flows.stop import TERMINATED, Stopper
from slime_core.run.stop_request import ask, asked
from tests.integration.flows.standin import StandIn


@pytest.fixture(autouse=True)
def harmless(monkeypatch):
    """A stop that takes long must not kill the tests."""
    monkeypatch.setattr(stop, "kill_everything", lambda *_: None)
    monkeypatch.setattr(cancelled, "LOOK_S", 0.1)
    for name in ("PREFECT__WORKER_ID", "PREFECT__FLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def stopped(run: StandIn, launch) -> None:
    """Trains until something stops it."""
    from flows.launch import LAUNCH
    from flows.train import train

    async def body() -> None:
        LAUNCH.set(launch)
        task = asyncio.ensure_future(train(launch.config))
        stopper.watch(task)
        await task

    with Stopper() as stopper, pytest.raises(asyncio.CancelledError):
        asyncio.run(body())
    assert stopper.exit_code == TERMINATED
    assert run.closed == "interrupted"


def test_a_cancel_in_the_pages_stops_a_run_without_a_worker(server, tmp_path):
    async def cancel() -> None:
        async with get_client() as client:
            condition = filters.FlowRunFilter(name=filters.FlowRunFilterName(any_=["run-ui"]))
            [parent] = await client.read_flow_runs(flow_run_filter=condition)
            await client.set_flow_run_state(parent.id, Cancelling())
        await asyncio.sleep(60)

    run = StandIn(tmp_path, "run-ui", hooks={("generate", 1): cancel})
    stopped(run, run.launch())
    assert run.trained() == [0]


def test_a_flow_with_a_living_worker_leaves_the_cancel_to_it(monkeypatch):
    monkeypatch.setenv("PREFECT__WORKER_ID", "w")
    looked: list[object] = []

    async def look(flow_run_id):
        looked.append(flow_run_id)
        return True

    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(cancelled, "is_cancelled", look)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    parents = iter([7, 7, 7, 1, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    asyncio.run(asyncio.wait_for(cancelled.obey_cancel("id"), 10))  # type: ignore[arg-type]
    assert looked == ["id"], "only once the parent was another one"
    assert killed == [(os.getpid(), signal.SIGTERM)]


def test_a_wish_ends_the_run_between_two_iterations(server, tmp_path):
    async def wish() -> None:
        ask(tmp_path, 4)

    run = StandIn(tmp_path, "run-wish", hooks={("generate", 1): wish})
    launch = run.launch()
    launch.stop_asked = lambda: asked(tmp_path, 4)
    stopped(run, launch)
    assert run.trained() == [0, 1], "the iteration it was in is finished"
    assert ("sync", 1) in run.calls and ("sample", 2) not in run.calls
