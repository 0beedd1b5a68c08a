"""A run whose owner is killed by SIGKILL before, in the middle of and after writes."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from slime_core.run.audit import audit
from slime_core.run.epoch import Lease
from slime_core.store import backend as backend_module
from slime_core.store.backend import FileBackend
from tests.unit.run.simulation import DATASET_ROWS, GROUPS, Life, run_with_deaths

ITERATIONS = 4
# For each life: at which of its writes it is killed, and where within the write.
DEATHS = [(2, "middle"), (5, "after"), (9, "before"), (6, "middle"), (11, "after"), (7, "middle")]


class HeldBackend(FileBackend):
    """Stops for good at one write, so that a kill from outside meets an exact moment."""

    def __init__(self, root: Path, at: int, where: str, held) -> None:
        super().__init__(root)
        self._left, self._where, self._held = at, where, held

    def put_new(self, key, data):
        if key.startswith("epochs/"):
            super().put_new(key, data)
            return
        self._left -= 1
        if self._left == 0 and self._where == "before":
            self._hold()
        if self._left == 0 and self._where == "middle":
            backend_module.os.link = lambda *_: self._hold()  # written, but without its name
        super().put_new(key, data)
        if self._left == 0 and self._where == "after":
            self._hold()

    def _hold(self) -> None:
        self._held.send(True)
        signal.pause()


def own_the_run(root: Path, at: int, where: str, held) -> None:
    backend = HeldBackend(root, at, where, held)
    with Lease.acquire(backend, ttl_s=600) as lease:
        Life(backend, lease, ITERATIONS).live()
    os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kills_at_any_moment_leave_the_run_that_was_never_killed(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    for at, where in DEATHS:
        ours, theirs = context.Pipe()
        owner = context.Process(target=own_the_run, args=(tmp_path, at, where, theirs))
        owner.start()
        theirs.close()
        assert ours.poll(60), f"the owner never came to write {at}"
        ours.recv()
        owner.kill()
        owner.join(30)
        assert owner.exitcode == -signal.SIGKILL
    backend = FileBackend(tmp_path)
    with Lease.acquire(backend) as lease:
        assert lease.epoch == len(DEATHS)
        last = Life(backend, lease, ITERATIONS).live()
    _, expected = run_with_deaths(ITERATIONS, [])
    assert last.states == expected.states and last.frontier == expected.frontier
    found = audit(tmp_path, DATASET_ROWS)
    assert found.problems == [] and found.trained == ITERATIONS * GROUPS
    assert found.final_state == last.state
    leftovers = list((tmp_path / ".tmp").iterdir())
    assert len(leftovers) == sum(where == "middle" for _, where in DEATHS)
