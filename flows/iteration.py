"""One RL iteration as a Prefect subflow."""

from __future__ import annotations

import logging
from typing import Any

from prefect import flow

from flows.order import plain_iteration, stages_of
from flows.prefect_api import API_ERRORS, reachable, report_late, shown
from tasks._options import flow_options, unwrapped
from tasks.evaluate import evaluate
from tasks.generate import generate
from tasks.pack import pack
from tasks.reward import reward
from tasks.sample import sample
from tasks.sync import sync
from tasks.train import train

log = logging.getLogger(__name__)
TASKS = {task.name: task for task in (sample, generate, reward, pack, train, sync, evaluate)}


@flow(**flow_options("iteration", numbered=True))
async def iteration(k: int) -> None:
    """Sample, generate, reward, pack, train, sync, and every so often evaluate."""
    state = shown()
    state.begin()
    try:
        await stages_of(k, stage_task)
    except BaseException as error:
        state.failure = error
        raise
    state.finished = True


async def stage_task(name: str, iteration: int, *arguments: Any) -> Any:
    """Calls a stage as its task."""
    return await unwrapped(await TASKS[name](*arguments))


async def tolerant_iteration(k: int) -> None:
    """Runs iteration k as a subflow, and goes on without one where Prefect's API is away.

    The store knows which stages were done, so what began as a subflow is continued without it. A
    stage's own error ends the run: an error of its HTTP calls, which looks like Prefect's, comes
    again without the subflow.
    """
    state = shown()
    state.expect()
    if not await reachable():
        state.away = True
        log.warning("Prefect does not answer: iteration %06d is not shown there", k)
        await plain_iteration(k)
        return
    await report_late(state)
    try:
        await iteration(k)
    except API_ERRORS as error:
        state.away = True
        if state.failure is not None and state.failure is not error:
            raise state.failure from None
        log.warning("Prefect failed during iteration %06d: %s", k, error)
        if not state.finished:
            await plain_iteration(k)
