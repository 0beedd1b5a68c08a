"""A signal while a run's processes are being started, when the run is owned already."""

from __future__ import annotations

import subprocess
import sys

from slime_core.run.epoch import newest_epoch
from slime_core.store.backend import open_backend

STARTING = """
import signal, sys
from flows.stop import Stopper
from slime_core.run.epoch import Lease
from slime_core.store.backend import open_backend

with Stopper() as stopper:
    lease = Lease.acquire(open_backend(sys.argv[1]))
    stopper.gives_back(lease.release)
    signal.raise_signal(signal.SIGTERM)  # before there is a task that could be cancelled
    raise SystemExit("it went on")
"""


def test_a_run_that_is_stopped_while_it_starts_counts_as_stopped(tmp_path):
    command = [sys.executable, "-c", STARTING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 143, done.stderr
    newest = newest_epoch(open_backend(str(tmp_path), read_only=True))
    assert newest is not None and newest.ended, "its owner came to an end and was not killed"
