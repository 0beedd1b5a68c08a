"""Flow runs whose end Prefect was never told."""

from __future__ import annotations

from pathlib import Path

from flows.prefect_api import end_dead
from flows.services import processes
from flows.services.runs import is_dead, orphans
from flows.services.stack import WORKER
from slime_core.run.ending import noted_end
from slime_core.run.paths import RunPaths
from slime_core.store.backend import open_backend


async def tell_the_dead(workspace: Path) -> list[tuple[str, str]]:
    """Shows how runs ended whose process is gone: as they noted it where Prefect was away then,
    else crashed. Where a worker is to be started, call it before.

    Returns:
        (training, as far as the workspace's store has it, else the flow run's name; crashed,
        finished, interrupted or failed).
    """
    workspace = workspace.absolute()
    store = workspace / "store"
    return await end_dead(
        lambda run_id: is_dead(open_backend(str(store / run_id), read_only=True)),
        orphans(processes.recorded(workspace, WORKER)),
        lambda run_id, shown_as: noted_end(RunPaths(workspace, run_id).local, str(shown_as)),
    )
