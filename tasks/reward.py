"""The reward stage as a Prefect task."""

from __future__ import annotations

from prefect import State, task

from slime_core.refs import Ref
from tasks._options import as_state, task_options
from tasks._run import run_stage


@task(**task_options("reward"))
async def reward(seal: Ref) -> Ref | State[Ref]:
    """Score a sealed segment as a whole, where a batch-wide reward is configured."""
    return as_state(await run_stage("reward", seal.iteration, seal))
