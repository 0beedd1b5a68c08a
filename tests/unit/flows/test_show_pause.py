"""When Prefect is told that a run waits for its store."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.states import Cancelled, Cancelling, Completed, Running

from flows import prefect_api
from flows.prefect_api import show_pause


def told(monkeypatch: pytest.MonkeyPatch, state: object, why: str | None) -> list[tuple]:
    """The states that a flow run in `state` is set to: (name, message, whether it is forced)."""
    found: list[tuple] = []
    run = uuid4()

    async def read_flow_run(which):
        assert which == run
        return SimpleNamespace(state=state)

    async def set_flow_run_state(which, wanted, force):
        assert which == run and wanted.is_running()
        found.append((wanted.name, wanted.message, force))

    @asynccontextmanager
    async def client():
        yield SimpleNamespace(read_flow_run=read_flow_run, set_flow_run_state=set_flow_run_state)

    async def reachable() -> bool:
        return True

    monkeypatch.setattr(prefect_api, "get_client", client)
    monkeypatch.setattr(prefect_api, "reachable", reachable)
    asyncio.run(show_pause(run, why))
    return found


def test_a_running_run_is_shown_as_paused_and_as_running_again(monkeypatch):
    assert told(monkeypatch, Running(), "no space") == [("Paused", "no space", True)]
    paused = Running(name="Paused", message="no space")
    assert told(monkeypatch, paused, None) == [("Running", "the store can be used again", True)]


@pytest.mark.parametrize("state", [Cancelling(), Cancelled(), Completed(), None])
@pytest.mark.parametrize("why", ["no space", None])
def test_a_cancel_or_an_end_is_never_written_over(monkeypatch, state, why):
    assert told(monkeypatch, state, why) == []
