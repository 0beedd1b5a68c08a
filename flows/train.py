"""The training: one parent flow per run, with a subflow for each iteration."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

from prefect import State, flow
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    temporary_settings,
)
from prefect.utilities.urls import url_for

from flows.cancelled import obey_cancel
from flows.deployed import deployed
from flows.iteration import stage_task, tolerant_iteration
from flows.launch import Launch
from flows.order import training
from flows.pages.places import own_prefect_home
from flows.pages.watched import watch_context, watched
from flows.prefect_api import (
    API_ERRORS,
    SHOWN,
    Shown,
    announce,
    crash_unfinished,
    report_late,
    show_pause,
)
from flows.services.ended import tell_the_dead
from slime_core.config.tree import RunConfig
from tasks._options import flow_options
from tasks.recover import recover

log = logging.getLogger(__name__)


@flow(**flow_options("train", numbered=False))
async def train(
    config: RunConfig, overrides: dict[str, Any] | None = None, resume: str = "auto"
) -> State[None] | None:
    """Train a language model by reinforcement learning.

    Args:
        config: the whole configuration.
        overrides: single values over it by field name, such as {"lr": 1e-4}.
        resume: "auto" takes up the last unfinished run of the same identity, "never" starts
            another, a run id takes exactly that one.
    """
    launch = Launch.current()
    if launch is None:
        return await deployed(config, overrides or {}, resume, launched)
    await launched(launch)
    return None


async def launched(launch: Launch) -> None:
    """Trains a run whose processes are starting, and shows it."""
    launch.flow_run_id = await announce(launch.run_id)
    shown = Shown(launch.flow_run_id)
    SHOWN.set(shown)
    launch.show_pause = partial(show_pause, launch.flow_run_id)
    launch.report.say(f"Prefect shows it at {url_for('flow-run', launch.flow_run_id)}")
    watch = asyncio.ensure_future(obey_cancel(launch.flow_run_id))
    try:
        with watched(launch, shown, launch.flow_run_id):
            await _trained(launch)
        await report_late(shown)
    except Exception:
        await report_late(shown, failed=True)
        raise
    finally:
        watch.cancel()


async def _trained(launch: Launch) -> None:
    async with launch.running() as run:
        watch_context(run)
        await crash_unfinished(launch.run_id)
        await _tell_of_others(launch)
        recovery = await recover()
        launch.tell(recovery)
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            await training(run, recovery, stage_task, tolerant_iteration)


async def _tell_of_others(launch: Launch) -> None:
    """Sets the end of the workspace's other runs that came to it while Prefect was away."""
    workspace = Path(launch.config.run.workspace).absolute()
    if own_prefect_home(workspace, PREFECT_API_URL.value()) is None:
        return
    try:
        for run_id, how in await tell_the_dead(workspace):
            log.info("%s had %s while Prefect was away", run_id, how)
    except API_ERRORS as error:
        log.warning("Prefect was not told how other runs ended: %s", error)
