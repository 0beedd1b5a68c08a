"""`slime status`: the services of a workspace, and its runs that are alive."""

from __future__ import annotations

from pathlib import Path

from flows.cli.stored import AWAY_PATIENCE_S, is_folder, root_url, show
from flows.services import processes, stack
from flows.services.runs import live_runs
from slime_core.config.flags import FlagParser, parse
from slime_core.errors import AwayError
from slime_core.run.pause import Pause, paused_runs
from slime_core.run.process import ProcessIdentity
from slime_core.store.backend import open_backend


def main(arguments: list[str]) -> int:
    """Prints both; 0 if every service runs, else 3."""
    made = FlagParser(prog="slime status", description=__doc__)
    made.add_argument("--workspace", default="runs", help="folder that holds the runs")
    made.add_argument("--store-url", help="URL of the store, where it is not in the workspace")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parse(made, arguments)
    workspace = Path(options.workspace).absolute()
    lines = [_line(workspace, name) for name in (stack.SERVER, stack.MLFLOW, stack.WORKER)]
    show(lines, as_json=options.json)
    url = root_url(options)
    there = "://" in url or is_folder(Path(url))
    paused = {pause.run_id: pause for pause in paused_runs(workspace)}
    try:
        root = open_backend(url, read_only=True, patience_s=AWAY_PATIENCE_S) if there else None
        runs = live_runs(root, url) if root is not None else []
        away = ""
    except AwayError as error:
        runs, away = [], f"\nthe store does not say which runs are alive: {error}"
    owners = {run.run_id: run.owner for run in runs} | {p.run_id: p.owner for p in paused.values()}
    if not options.json:
        print(away or ("" if owners else "\nno run is alive"))
    rows = [_run(run_id, owner, paused.get(run_id)) for run_id, owner in owners.items()]
    show(rows if options.json else [_without(row, "why") for row in rows], as_json=options.json)
    for pause in () if options.json else paused.values():
        print(f"\n{pause.run_id} is {pause.describe()}")
    return 0 if all(line["state"] == "running" for line in lines) else 3


def _run(run_id: str, owner: ProcessIdentity, pause: Pause | None) -> dict[str, object]:
    return {
        "run": run_id,
        "state": "running" if pause is None else "paused",
        "process": owner.pid,
        "host": owner.host,
        "why": None if pause is None else pause.cause,
    }


def _without(row: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in row.items() if key != name}


def _line(workspace: Path, name: str) -> dict[str, object]:
    service = processes.recorded(workspace, name)
    alive = service is not None and service.alive
    state = "running" if alive else "never started" if service is None else "ended"
    return {
        "service": stack.TITLES[name],
        "state": state,
        "address": service.address if service is not None and alive else None,
        "process": service.process.pid if service is not None and alive else None,
        "log": str(processes.log_of(workspace, name)) if service is not None else None,
    }
