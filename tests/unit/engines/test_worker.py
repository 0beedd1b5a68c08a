"""The engine thread: commands between steps, pauses, and no half-dead process."""

from __future__ import annotations

import threading

import pytest

from slime_core.engines.embedded import worker as worker_module
from slime_core.engines.embedded.worker import FATAL_EXIT_CODE, EngineWorker

WAIT_S = 20


@pytest.fixture
def started(new_scheduler):
    """A running worker and what it reports; the thread waits for commands when a test ends."""
    reports: list = []
    ended = threading.Event()

    def report(progress) -> None:
        reports.extend(progress)
        if any(request.finish for request, _ in progress):
            ended.set()

    worker = EngineWorker(new_scheduler(), report)
    worker.start()
    return worker, reports, ended


def test_requests_are_reported_with_their_count(started, new_request):
    worker, reports, ended = started
    request = new_request([24, 21], 5, ignore_eos=True)
    request.stream = True
    worker.submit([request])
    assert ended.wait(WAIT_S)
    counts = [count for _, count in reports]
    assert counts == sorted(counts) and counts[-1] == 5
    assert len(counts) > 1


def test_an_error_belongs_to_its_caller(started):
    worker, _, _ = started

    def fail(_):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        worker.call(fail).result(WAIT_S)
    assert worker.call(lambda scheduler: scheduler.idle).result(WAIT_S) is True


def test_a_caller_that_gave_up_does_not_end_the_engine(started):
    worker, _, _ = started
    go, ran = threading.Event(), []
    worker.call(lambda _: go.wait(WAIT_S))
    given_up = worker.call(lambda _: ran.append(1))
    assert given_up.cancel()
    go.set()
    assert worker.call(lambda _: "alive").result(WAIT_S) == "alive"
    assert ran == []


def test_nothing_moves_under_a_pause(started, new_request):
    worker, _, ended = started
    request = new_request([24, 21], 200, ignore_eos=True)
    worker.call(lambda scheduler: setattr(scheduler, "step_pause_s", 0.005)).result(WAIT_S)
    worker.submit([request])
    worker.pause(retract=False).result(WAIT_S)
    count = len(request.output)
    for _ in range(5):
        assert worker.call(lambda _: len(request.output)).result(WAIT_S) == count
    assert worker.abort(lambda _: True).result(WAIT_S) == 1
    assert ended.wait(WAIT_S) and request.finish["type"] == "abort"
    worker.resume().result(WAIT_S)


def test_a_failing_step_ends_the_process(monkeypatch, new_scheduler, new_request):
    codes: list[int] = []
    monkeypatch.setattr(worker_module, "end_process", codes.append)
    scheduler = new_scheduler()
    monkeypatch.setattr(scheduler, "step", lambda: 1 / 0)
    worker = EngineWorker(scheduler, lambda progress: None)
    worker.start()
    worker.submit([new_request([24])])
    worker.join(WAIT_S)
    assert codes == [FATAL_EXIT_CODE]
