"""The worker process: `python -m flows.services.worker_app`.

Prefect's own command kills the flows of a worker that is told to end, and leaves them Running in
the pages. This one asks them to end and waits, so each says itself how it ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys

import psutil
from prefect.settings import PREFECT_WORKER_HEARTBEAT_SECONDS
from prefect.workers.process import ProcessWorker

RUNS_END_S = 25.0
"""Longer than a flow takes that ends cleanly, shorter than whoever ends a worker waits."""


def main() -> int:
    """Works until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--pool", required=True)
    parser.add_argument("--limit", type=int, required=True, help="runs at once")
    options = parser.parse_args()
    asyncio.run(work(options.pool, options.limit))
    return 0


async def work(pool: str, limit: int) -> None:
    """Takes runs of a pool until this process is told to end."""
    worker = ProcessWorker(
        work_pool_name=pool,
        name=f"slime-{os.getpid()}",
        limit=limit,
        heartbeat_interval_seconds=int(PREFECT_WORKER_HEARTBEAT_SECONDS.value()),
    )
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    working = asyncio.ensure_future(worker.start(printer=print))
    telling = asyncio.ensure_future(told.wait())
    await asyncio.wait([working, telling], return_when=asyncio.FIRST_COMPLETED)
    if told.is_set():
        await asyncio.to_thread(end_flows, psutil.Process().children(), RUNS_END_S)
        working.cancel()
    telling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


def end_flows(flows: list[psutil.Process], seconds: float) -> None:
    """Asks flows to end and waits for them; they can be resumed."""
    for process in flows:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(flows, timeout=seconds)
    for process in alive:
        print(f"flow process {process.pid} has not ended after {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
