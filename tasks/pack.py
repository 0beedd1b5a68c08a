"""The pack stage as a Prefect task."""

from __future__ import annotations

from prefect import State, task

from slime_core.refs import Ref
from tasks._options import as_state, task_options
from tasks._run import run_stage


@task(**task_options("pack"))
async def pack(scored: Ref) -> Ref | State[Ref]:
    """Select the groups and optimizer steps of an iteration."""
    return as_state(await run_stage("pack", scored.iteration, scored))
