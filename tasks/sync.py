"""The sync stage as a Prefect task."""

from __future__ import annotations

from prefect import State, task

from slime_core.refs import Ref
from tasks._options import as_state, task_options
from tasks._run import run_stage


@task(**task_options("sync"))
async def sync(ledger: Ref) -> Ref | State[Ref]:
    """Bring the weights of a ledger into every engine."""
    return as_state(await run_stage("sync", ledger.iteration, ledger))
