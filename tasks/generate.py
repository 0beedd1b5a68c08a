"""The generate stage as a Prefect task."""

from __future__ import annotations

from prefect import State, task

from slime_core.refs import Ref
from tasks._options import as_state, task_options
from tasks._run import run_stage


@task(**task_options("generate"))
async def generate(draws: Ref) -> Ref | State[Ref]:
    """Generate the groups of a segment until its target is reached, and seal it."""
    return as_state(await run_stage("generate", draws.iteration, draws))
