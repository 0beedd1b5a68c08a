"""A stop while the store is away: its lease cannot be given back, and the end does not wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slime_core.run.epoch import Lease, newest_epoch
from slime_core.store.backend import open_backend
from tests.s3 import ENVIRONMENT, troubled, unique_prefix

PAUSED = """
import asyncio, sys
from pathlib import Path
from flows.stop import Stopper
from slime_core.errors import UnavailableError
from slime_core.run.epoch import Lease, give_back
from slime_core.run.pause import Patience
from slime_core.store.backend import open_backend

async def tell(pause):
    print("paused", flush=True)

async def work():
    raise UnavailableError("SlowDown")

async def run(url, local):
    lease = Lease.acquire(open_backend(url))
    print("owned", flush=True)
    sys.stdin.readline()
    task = asyncio.ensure_future(Patience("r", url, local, 600.0, tell).bear("pack", work))
    stopper.watch(task)
    try:
        await task
    except asyncio.CancelledError:
        await give_back(lease, 1.0)

with Stopper(clean_end_s=40) as stopper:  # the store is asked for 60
    asyncio.run(run(sys.argv[1], Path(sys.argv[2])))
print("a clean end", flush=True)
sys.exit(stopper.exit_code)
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_stop_does_not_wait_for_a_store_that_is_away(s3_url, tmp_path, monkeypatch):
    with troubled(s3_url) as (url, trouble):
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        root = unique_prefix("stop")
        process = subprocess.Popen(
            [sys.executable, "-c", PAUSED, root, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ),
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        trouble.away = (503, "SlowDown")
        process.stdin.write("the store is away\n")
        process.stdin.flush()
        assert process.stdout.readline() == "paused\n"
        process.terminate()
        output, _ = process.communicate(timeout=300)
        assert output.endswith("a clean end\n") and process.returncode == 143
        trouble.away = None
        backend = open_backend(root)
        newest = newest_epoch(backend)
        assert newest is not None and (newest.epoch, newest.ended) == (0, False)
        with Lease.acquire(backend, ttl_s=600) as lease:
            assert lease.epoch == 1, "its process is seen to be gone"
