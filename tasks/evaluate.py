"""The evaluate stage as a Prefect task."""

from __future__ import annotations

from prefect import State, task

from slime_core.refs import Ref
from tasks._options import as_state, task_options
from tasks._run import run_stage


@task(**task_options("evaluate"))
async def evaluate(k: int, version: int) -> Ref | State[Ref] | None:
    """Score the held-out prompts with the served weights, after iteration k."""
    return as_state(await run_stage("evaluate", k, k, version))
