"""The training: one parent flow per run, with a subflow for each iteration."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import State, flow
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.utilities.urls import url_for

from flows.cancelled import obey_cancel
from flows.deployed import deployed
from flows.iteration import stage_task, tolerant_iteration
from flows.launch import Launch
from flows.order import training
from flows.pages.watched import watch_context, watched
from flows.prefect_api import SHOWN, Shown, announce, crash_unfinished
from slime_core.config.tree import RunConfig
from tasks._options import flow_options
from tasks.recover import recover


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
    shown = Shown()
    SHOWN.set(shown)
    launch.flow_run_id = await announce(launch.run_id)
    launch.report.say(f"Prefect shows it at {url_for('flow-run', launch.flow_run_id)}")
    watch = asyncio.ensure_future(obey_cancel(launch.flow_run_id))
    try:
        with watched(launch, shown, launch.flow_run_id):
            await _trained(launch)
    finally:
        watch.cancel()


async def _trained(launch: Launch) -> None:
    async with launch.running() as run:
        watch_context(run)
        await crash_unfinished(launch.run_id)
        recovery = await recover()
        launch.tell(recovery)
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            await training(run, recovery, stage_task, tolerant_iteration)
