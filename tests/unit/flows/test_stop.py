"""What a signal does to a run."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import pytest

from flows import stop
from flows.stop import STOPPING, Stopper


class NoTimer:
    """Stands for the timer that kills everything when a clean end takes too long."""

    daemon = False

    def __init__(self, *_: object) -> None:
        return

    def start(self) -> None:
        return


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch):
    """Gives the signals back to pytest, and never kills it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(stop.threading, "Timer", NoTimer)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_a_print_does_not_enter_it_again(handlers, capfd, number, status):
    said: list[str] = []
    printing = False

    def say(text: str) -> None:
        nonlocal printing
        assert not printing, "a print was entered again, which Python's streams refuse"
        printing = True
        said.append(text)
        if text == "iteration 1":
            signal.raise_signal(number)
        printing = False

    async def body() -> None:
        say("iteration 1")
        await asyncio.sleep(60)

    async def run() -> bool:
        task = asyncio.ensure_future(body())
        stopper.watch(task)
        with suppress(asyncio.CancelledError):
            await task
        return task.cancelled()

    stopper = Stopper()
    assert asyncio.run(run())
    assert said == ["iteration 1"] and STOPPING in capfd.readouterr().out
    assert stopper.exit_code == status


def test_before_the_loop_a_signal_interrupts_at_once(handlers, capfd):
    stopper = Stopper()
    stopper.install()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert STOPPING in capfd.readouterr().out
    assert stopper.exit_code == 130
