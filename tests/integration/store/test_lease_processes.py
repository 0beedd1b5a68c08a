"""Leases between real processes: contended at once, and left behind by SIGKILL."""

import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

from slime_core.errors import StoreError
from slime_core.run.epoch import Lease, newest_epoch
from slime_core.store.backend import open_backend

CONTENDERS = 4


def contend(root: str, barrier, results) -> None:
    backend = open_backend(root)
    barrier.wait(60)
    try:
        lease = Lease.acquire(backend, ttl_s=60)
    except StoreError as error:
        results.put((None, str(error)))
        barrier.wait(60)
        return
    results.put((lease.epoch, ""))
    barrier.wait(60)
    lease.guard()
    lease.release()


def test_of_several_starts_at_once_one_owns_the_run(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(CONTENDERS), context.Queue()
    workers = [
        context.Process(target=contend, args=(str(tmp_path), barrier, results))
        for _ in range(CONTENDERS)
    ]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=180) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    epochs = [epoch for epoch, _ in found if epoch is not None]
    refusals = [text for epoch, text in found if epoch is None]
    assert epochs == [0] and len(refusals) == CONTENDERS - 1
    assert all("process" in text for text in refusals)


OWNER = """
import sys
from slime_core.run.epoch import Lease
from slime_core.store.backend import open_backend
lease = Lease.acquire(open_backend(sys.argv[1]), ttl_s=600)
print(lease.epoch, flush=True)
sys.stdin.read()
"""


def test_a_killed_owner_is_followed_at_once_and_a_living_one_never(tmp_path: Path):
    backend = open_backend(str(tmp_path))
    for expected in range(3):
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert owner.stdout is not None and owner.stdout.readline().strip() == str(expected)
        try:
            Lease.acquire(backend)
            raise AssertionError("the living owner was disturbed")
        except StoreError as error:
            assert f"process {owner.pid}" in str(error)
        owner.send_signal(signal.SIGKILL)
        owner.wait(30)
        owner.communicate(timeout=90)
    began = time.monotonic()
    with Lease.acquire(backend) as lease:
        assert lease.epoch == 3 and time.monotonic() - began < 20
    state = newest_epoch(backend)
    assert state is not None and state.ended
