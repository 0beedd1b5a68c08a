"""The sample stage as a Prefect task."""

from __future__ import annotations

from prefect import State, task

from slime_core.refs import Ref
from tasks._options import as_state, task_options
from tasks._run import run_stage


@task(**task_options("sample"))
async def sample(k: int) -> Ref | State[Ref]:
    """Open segment k and log its draws."""
    return as_state(await run_stage("sample", k, k))
