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

from slime_core.waits import Deadline

RUNS_END_S = 28.0
"""Longer than a flow takes that ends cleanly or kills itself over it, shorter than whoever ends a
worker waits."""
LOOK_S = 0.1


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
        await end_flows(worker, RUNS_END_S)
        working.cancel()
    telling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def end_flows(worker: ProcessWorker, seconds: float) -> None:
    """Asks flows to end, also those that are only being started, and waits until Prefect knows how
    each of them ended. No other run is taken meanwhile; they can be resumed."""
    if not worker.is_setup:
        return
    deadline = Deadline("the end of the worker's flows", seconds)
    asked: set[psutil.Process] = set()
    while held := worker.limiter.borrowed_tokens:
        if deadline.expired:
            print(f"{held} flow runs have not ended after {seconds:.0f} s", flush=True)
            return
        worker.limiter.total_tokens = held  # what ends leaves no room for another run
        for process in set(children()) - asked:
            asked.add(process)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        await asyncio.sleep(LOOK_S)


def children() -> list[psutil.Process]:
    """The flow processes of this worker."""
    return psutil.Process().children()


if __name__ == "__main__":
    sys.exit(main())
