"""A cancel that was asked for in Prefect, where nobody else brings it to the run."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from uuid import UUID

from prefect.client.orchestration import get_client

from flows.prefect_api import API_ERRORS, reachable

log = logging.getLogger(__name__)
LOOK_S = 2.0


async def obey_cancel(flow_run_id: UUID) -> None:
    """Looks now and then whether somebody has cancelled the flow run, and then ends this process
    as SIGTERM does.

    A worker brings a cancel to the flows that it has started. Nobody does so for a run that was
    started from a terminal, or whose worker has died.
    """
    parent = os.getppid()
    while True:
        await asyncio.sleep(LOOK_S)
        if has_worker(parent):
            continue
        if await is_cancelled(flow_run_id):
            log.info("Prefect was told to cancel this run")
            os.kill(os.getpid(), signal.SIGTERM)
            return


def has_worker(parent_pid: int) -> bool:
    """Whether the worker that started this process lives.

    Args:
        parent_pid: of this process when it started.
    """
    started_by_one = "PREFECT__WORKER_ID" in os.environ or "PREFECT__FLOW_RUN_ID" in os.environ
    return started_by_one and os.getppid() == parent_pid


async def is_cancelled(flow_run_id: UUID) -> bool:
    """Whether somebody has cancelled a flow run; False where Prefect does not answer."""
    if not await reachable():
        return False
    try:
        async with get_client() as client:
            state = (await client.read_flow_run(flow_run_id)).state
    except API_ERRORS as error:
        log.debug("Prefect did not say whether the run is cancelled: %s", error)
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())
