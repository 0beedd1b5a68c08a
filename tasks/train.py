"""The train stage as a Prefect task."""

from __future__ import annotations

from prefect import State, task

from slime_core.refs import Ref
from tasks._options import as_state, task_options
from tasks._run import run_stage


@task(**task_options("train"))
async def train(batch: Ref) -> Ref | State[Ref]:
    """Train a batch exactly once and write its ledger."""
    return as_state(await run_stage("train", batch.iteration, batch))
