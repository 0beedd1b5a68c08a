"""`slime status`: the services of a workspace, and its runs that are alive."""

from __future__ import annotations

from pathlib import Path

from flows.cli.stored import is_folder, root_url, show
from flows.services import processes, stack
from flows.services.runs import live_runs
from slime_core.config.flags import FlagParser, parse
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
    runs = live_runs(open_backend(url, read_only=True), url) if there else []
    if not options.json:
        print("" if runs else "\nno run is alive")
    show(
        [{"run": run.run_id, "process": run.owner.pid, "host": run.owner.host} for run in runs],
        as_json=options.json,
    )
    return 0 if all(line["state"] == "running" for line in lines) else 3


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
