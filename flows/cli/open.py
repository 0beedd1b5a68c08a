"""`slime open RUN`: where a run is to be seen: its pages in Prefect and MLflow, and its store."""

from __future__ import annotations

from pathlib import Path

from flows.cli.stored import open_run, parser, root_url, show
from flows.pages.places import mlflow_page, prefect_page
from slime_core.config.flags import parse
from slime_core.run.paths import RunPaths
from slime_core.run.recorded import last_config
from slime_core.store.backend import join_url


def main(arguments: list[str]) -> int:
    """Prints the addresses; of a page that nobody serves now, the command that serves it."""
    options = parse(parser("open", __doc__), arguments)
    run_id, cache = open_run(options)
    workspace = Path(options.workspace).absolute()
    config = last_config(cache.backend, {"workspace": str(workspace)})
    found = {
        "run": run_id,
        "Prefect": prefect_page(workspace, run_id),
        "MLflow": mlflow_page(config, run_id) if config.tracking.use_mlflow else None,
        "store": join_url(root_url(options), run_id),
        "logs": str(RunPaths(workspace, run_id).logs),
    }
    if options.json:
        show([found], as_json=True)
        return 0
    for name, place in found.items():
        print(f"{name:<8} {place or '-'}")
    return 0
