"""`slime down`: ends what `slime up` started in this workspace, and nothing else."""

from __future__ import annotations

from pathlib import Path

from flows.services import processes, stack
from flows.services.processes import Service
from flows.services.runs import LiveRun, held_by, users_of
from slime_core.config.flags import FlagParser, parse


def main(arguments: list[str]) -> int:
    """Ends the services; the runs of the worker end first and can be resumed."""
    made = FlagParser(prog="slime down", description=__doc__)
    made.add_argument("--workspace", default="runs", help="folder that holds the runs")
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    workspace = Path(parse(made, arguments).workspace).absolute()
    left = _left_alone(workspace)
    ended = 0
    for service in stack.stop_all(workspace, _tell_runs):
        print(f"{stack.TITLES[service.name]:<8}  process {service.process.pid} ended")
        ended += 1
    for run in left:
        print(f"goes on   run {run.run_id}, process {run.owner.pid}, which Prefect shows no more")
    if not ended:
        print(f"nothing runs for {workspace}")
    return 0


def _left_alone(workspace: Path) -> list[LiveRun]:
    """Runs that use the server and that no worker of ours has started."""
    server = processes.running(workspace, stack.SERVER)
    if server is None:
        return []
    worker = processes.running(workspace, stack.WORKER)
    ours = {process.pid for process in held_by(worker)} if worker else set()
    return [run for run in users_of(server, workspace) if run.owner.pid not in ours]


def _tell_runs(worker: Service) -> None:
    count = len(held_by(worker))
    if count:
        print(f"runs that the worker stops: {count}; `slime resume RUN` goes on")
