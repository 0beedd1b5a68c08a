"""The training: one parent flow per run, with a subflow for each iteration."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.utilities.urls import url_for

from flows.iteration import stage_task, tolerant_iteration
from flows.launch import Launch
from flows.order import training
from flows.prefect_api import SHOWN, Shown, announce, crash_unfinished
from slime_core.check.inspection import require
from slime_core.config.loading import load_config
from slime_core.config.tree import RunConfig
from tasks._options import flow_options
from tasks.recover import recover


@flow(**flow_options("train", numbered=False))
async def train(
    config: RunConfig, overrides: dict[str, Any] | None = None, resume: str = "auto"
) -> None:
    """Train a language model by reinforcement learning.

    Args:
        config: the whole configuration.
        overrides: single values over it by field name, such as {"lr": 1e-4}.
        resume: "auto" takes up the last unfinished run of the same identity, "never" starts
            another, a run id takes exactly that one.
    """
    if overrides:
        config = load_config(config.model_dump(), overrides)
    launch = Launch.current()
    if launch is None:  # a worker runs this flow; the command line has looked already
        require(config)
        launch = Launch.start(config, resume)
    SHOWN.set(Shown())
    launch.flow_run_id = await announce(launch.run_id)
    launch.report.say(f"Prefect shows it at {url_for('flow-run', launch.flow_run_id)}")
    async with launch.running() as run:
        await crash_unfinished(launch.run_id)
        recovery = await recover()
        launch.tell(recovery)
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            await training(run, recovery, stage_task, tolerant_iteration)
