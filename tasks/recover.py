"""The recover step as a Prefect task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import task

from tasks._options import task_options
from tasks._run import bound

if TYPE_CHECKING:
    from slime_core.run.recover import Recovery


@task(**task_options("recover", numbered=False))
async def recover() -> Recovery:
    """Bring trainer, engines and the open segment to where the store says the run is."""
    run = bound()
    return await run.stages.recover(run.context)
