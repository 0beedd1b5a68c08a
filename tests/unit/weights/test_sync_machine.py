"""The weight sync as a state machine: order, retries, quarantine, deadlines and the gate."""

import asyncio
from typing import Any

import pytest

from slime_core.engines.client import EngineAnswerError, EngineUnreachableError
from slime_core.errors import DeadlineError, EngineError, TrainerError
from slime_core.weights.sync.canary import CanaryReading
from slime_core.weights.sync.machine import SyncOutcome, SyncState, WeightSync

CANARY = CanaryReading((1, 2, 3), (-1.0, -2.0))
VERSION = "l0-2"


class World:
    """Everything that happens, in order, and what is told to fail."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.hanging: set[str] = set()
        self.failures: dict[str, list[Exception]] = {}
        self.open = True

    async def happens(self, event: str) -> None:
        self.events.append(event)
        if event in self.hanging:
            await asyncio.Event().wait()
        if self.failures.get(event):
            raise self.failures[event].pop(0)


class Gate:
    def __init__(self, world: World) -> None:
        self.world = world

    async def close(self) -> None:
        await self.world.happens("gate closes")
        self.world.open = False

    async def open(self) -> None:
        await self.world.happens("gate opens")
        self.world.open = True


class Transport:
    def __init__(self, world: World) -> None:
        self.world = world

    async def prepare(self, version: str) -> None:
        await self.world.happens("prepare")

    async def send(self, client: Any, version: str) -> None:
        await self.world.happens(f"send {client.url}")
        client.version = version

    async def finish(self, version: str) -> None:
        await self.world.happens("finish")


class Engine:
    """A client of an engine that behaves until told otherwise."""

    def __init__(self, world: World, url: str) -> None:
        self.world, self.url = world, url
        self.version = "l0-1"
        self.log_probs = [-1.0, -2.000001]
        self.refusals = 0

    async def pause(self, mode: str) -> None:
        assert mode == "abort"
        await self.world.happens(f"pause {self.url}")

    async def flush_cache(self) -> bool:
        await self.world.happens(f"flush {self.url}")
        self.refusals -= 1
        return self.refusals < 0

    async def resume(self) -> None:
        await self.world.happens(f"resume {self.url}")

    async def score_versioned(self, tokens: Any) -> tuple[list[float], str]:
        await self.world.happens(f"verify {self.url}")
        assert tuple(tokens) == CANARY.tokens
        return self.log_probs, self.version


class Fleet:
    def __init__(self, *urls: str, timeout_s: float = 5.0, min_engines: int = 1) -> None:
        self.world = World()
        self.engines = {url: Engine(self.world, url) for url in urls}
        self.sync = WeightSync(
            Gate(self.world), Transport(self.world), timeout_s, 1e-5, min_engines
        )

    def run(self) -> SyncOutcome:
        clients: dict[str, Any] = dict(self.engines)
        return asyncio.run(self.sync.run(VERSION, CANARY, clients))


def test_one_engine_goes_through_the_states_in_their_order():
    fleet = Fleet("a")
    outcome = fleet.run()
    assert fleet.world.events == [
        "prepare", "gate closes", "pause a", "flush a", "send a", "flush a", "resume a", "verify a",
        "finish",
    ]  # fmt: skip
    assert (outcome.version, outcome.serving, outcome.quarantined) == (VERSION, ("a",), {})
    assert outcome.canary == pytest.approx(1e-6)
    assert fleet.sync.state is SyncState.COMMIT and not fleet.world.open
    asyncio.run(fleet.sync.resume())
    assert fleet.sync.state is SyncState.SERVING and fleet.world.open


def test_nothing_stops_while_weights_are_prepared_and_a_failure_there_changes_nothing():
    fleet = Fleet("a")
    fleet.world.failures["prepare"] = [TrainerError("weights cannot be written: disk full")]
    with pytest.raises(TrainerError, match="disk full"):
        fleet.run()
    assert fleet.world.events == ["prepare"] and fleet.world.open
    assert fleet.sync.state is SyncState.SERVING


@pytest.mark.parametrize(
    ("event", "state"),
    [("pause b", "quiet"), ("flush b", "quiet"), ("send b", "transfer"), ("verify b", "verify")],
)
def test_an_engine_that_fails_twice_is_named_with_its_own_state(event, state):
    fleet = Fleet("a", "b")
    fleet.world.failures[event] = [EngineUnreachableError("b", "gone")] * 2
    outcome = fleet.run()
    assert outcome.serving == ("a",)
    assert outcome.quarantined == {"b": f"{state}: b cannot be reached: gone"}


def test_nothing_is_sent_before_the_engine_itself_says_that_it_is_idle():
    """All answers are there when a pause returns, but SGLang may still hold its last batch."""
    fleet = Fleet("a")
    fleet.engines["a"].refusals = 3
    assert fleet.run().serving == ("a",)
    assert fleet.world.events[2:8] == ["pause a", *["flush a"] * 4, "send a"]


@pytest.mark.parametrize("event", ["pause a", "send a", "verify a"])
def test_a_transfer_that_fails_once_is_repeated_in_full(event):
    fleet = Fleet("a")
    fleet.world.failures[event] = [EngineAnswerError("a", 400, "shape")]
    assert fleet.run().serving == ("a",)
    assert fleet.world.events.count("pause a") == 2


def test_an_engine_with_other_numbers_is_not_used():
    fleet = Fleet("a", "b")
    fleet.engines["b"].log_probs = [-1.0, -2.1]
    outcome = fleet.run()
    assert outcome.serving == ("a",) and outcome.canary < 1e-5
    assert "differs from the trainer by 0.1 on the canary" in outcome.quarantined["b"]


def test_an_engine_whose_numbers_are_nan_is_not_used():
    fleet = Fleet("a")
    fleet.engines["a"].log_probs = [-1.0, float("nan")]
    with pytest.raises(EngineError, match="differs from the trainer by inf"):
        fleet.run()


def test_an_engine_that_echoes_another_version_is_not_used(monkeypatch):
    fleet = Fleet("a", "b")

    async def send(client: Any, version: str) -> None:
        client.version = version if client.url == "a" else "l0-1"

    monkeypatch.setattr(fleet.sync.transport, "send", send)
    outcome = fleet.run()
    assert outcome.serving == ("a",)
    assert outcome.quarantined["b"] == "verify: b echoes weight version l0-1, not l0-2"


def test_too_few_engines_fail_the_sync_and_the_gate_stays_closed():
    fleet = Fleet("a", "b", min_engines=2)
    fleet.world.failures["send b"] = [EngineUnreachableError("b", "gone")] * 2
    with pytest.raises(
        EngineError, match="1 engines serve it, 2 are needed: b: transfer: b cannot"
    ):
        fleet.run()
    assert not fleet.world.open and "gate opens" not in fleet.world.events
    assert "finish" not in fleet.world.events


def test_no_engine_at_all_says_so():
    fleet = Fleet()
    with pytest.raises(EngineError, match="0 engines serve it, 1 are needed: no engine is up"):
        fleet.run()


@pytest.mark.parametrize(
    ("event", "name", "state"),
    [
        ("prepare", "preparing weights l0-2", SyncState.SERVING),
        ("gate closes", "rollout workers to close their gate", SyncState.GATED),
    ],
)
def test_waits_before_the_transfer_have_names(event, name, state):
    fleet = Fleet("a", timeout_s=0.05)
    fleet.world.hanging = {event}
    with pytest.raises(DeadlineError, match=name):
        fleet.run()
    assert fleet.sync.state is state


def test_a_late_engine_is_quarantined_by_name_and_the_others_serve():
    fleet = Fleet("a", "b", timeout_s=0.1)
    fleet.world.hanging = {"send b"}
    outcome = fleet.run()
    assert outcome.serving == ("a",)
    assert outcome.quarantined["b"].startswith("transfer: waited 0 s for engine b to take l0-2")


def test_a_push_brings_one_engine_without_closing_the_gate():
    fleet = Fleet("a")
    gap = asyncio.run(fleet.sync.push("a", fleet.engines["a"], VERSION, CANARY))  # type: ignore[arg-type]
    assert gap == pytest.approx(1e-6)
    assert fleet.world.events == [
        "prepare", "pause a", "flush a", "send a", "flush a", "resume a", "verify a", "finish",
    ]  # fmt: skip
    assert fleet.world.open and fleet.sync.state is SyncState.SERVING


def test_a_failed_push_frees_what_was_prepared():
    fleet = Fleet("a")
    fleet.world.failures["verify a"] = [EngineUnreachableError("a", "gone")]
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(fleet.sync.push("a", fleet.engines["a"], VERSION, CANARY))  # type: ignore[arg-type]
    assert fleet.world.events[-1] == "finish" and fleet.sync.state is SyncState.SERVING
