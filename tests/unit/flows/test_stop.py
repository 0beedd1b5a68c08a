"""What a signal does to a run."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from flows import stop
from flows.stop import GOES_ON, STOPPING, Stopper


class NoTimer:
    """Stands for the timer that kills everything when a clean end takes too long."""

    daemon = False

    def __init__(self, *_: object) -> None:
        return

    def start(self) -> None:
        return


@pytest.fixture
def stopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopper]:
    """One that never kills pytest."""
    monkeypatch.setattr(stop.threading, "Timer", NoTimer)
    with Stopper() as made:
        yield made


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_a_print_does_not_enter_it_again(stopper, capfd, number, status):
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

    assert asyncio.run(run())
    assert said == ["iteration 1"] and STOPPING in capfd.readouterr().out
    assert stopper.exit_code == status


def test_what_ray_and_prefect_ask_for_is_passed_over_until_the_end(stopper):
    ours = signal.getsignal(signal.SIGTERM)
    asked = signal.signal(signal.SIGTERM, lambda *_: None)
    assert asked == ours == signal.getsignal(signal.SIGTERM)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.signal(signal.SIGUSR1, before) == signal.SIG_IGN, "other signals are theirs"


def test_the_handlers_from_before_come_back():
    before = [signal.getsignal(number) for number in stop.SIGNALS], signal.signal
    with Stopper():
        assert signal.signal != before[1]
    assert ([signal.getsignal(number) for number in stop.SIGNALS], signal.signal) == before


def test_a_signal_that_may_wait_cancels_the_task_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
):
    """Somebody else must be told how the run ended, so it does not end before it can say so."""
    monkeypatch.setattr(stop.threading, "Timer", NoTimer)
    monkeypatch.setattr(stop, "kill_everything", lambda *_: pytest.fail("it was killed"))
    begun = []

    async def body() -> None:
        begun.append(True)

    async def run() -> bool:
        signal.raise_signal(signal.SIGTERM)  # while something that takes long is being started
        task = asyncio.ensure_future(body())
        patient.watch(task)
        with suppress(asyncio.CancelledError):
            await task
        patient.unwatch()
        return task.cancelled()

    with Stopper(at_once=False) as patient:
        assert asyncio.run(run())
    assert not begun and patient.exit_code == 143


LATE = """
import asyncio, os
from flows.stop import Stopper

async def deaf():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass  # as where Prefect is away and asked again and again

async def run():
    task = asyncio.ensure_future(deaf())
    stopper.watch(task, lambda: os.write(1, b"given back\\n"))
    print("ready", flush=True)
    await task

with Stopper(clean_end_s=0.2) as stopper:
    asyncio.run(run())
"""


def test_a_run_that_does_not_end_in_time_is_killed_and_given_back():
    process = subprocess.Popen([sys.executable, "-c", LATE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 143
    assert output.index(STOPPING) < output.index(GOES_ON) < output.index("given back")


EARLY = """
import subprocess, sys, threading, time
from flows.stop import Stopper
with Stopper():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    threading.Thread(target=time.sleep, args=(60,)).start()
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_before_there_is_a_task_a_signal_ends_everything_at_once(number, status):
    process = subprocess.Popen(
        [sys.executable, "-c", EARLY],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.send_signal(number)
    output, errors = process.communicate(timeout=50)
    assert (process.returncode, errors) == (status, "")
    assert GOES_ON in output
    child.wait(10)


def test_a_signal_stops_a_run_that_nobody_reads(monkeypatch: pytest.MonkeyPatch, stopper):
    """Its terminal or pipe is gone, so the word of the stop cannot be written."""

    def gone(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(stop.os, "write", gone)

    async def run() -> bool:
        task = asyncio.ensure_future(asyncio.sleep(60))
        stopper.watch(task)
        signal.raise_signal(signal.SIGTERM)
        with suppress(asyncio.CancelledError):
            await task
        return task.cancelled()

    assert asyncio.run(run()) and stopper.exit_code == 143
