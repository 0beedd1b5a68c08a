"""Where a run is to be seen: its pages in Prefect and MLflow, its store, its files."""

from __future__ import annotations

import json
import sqlite3
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

from flows.cli.summary import MLFLOW_PORT, PREFECT_PORT, mlflow_command, prefect_command
from flows.server import HOST, api_answers, configured_api_url, own_server_pid
from flows.services import processes
from flows.services.stack import MLFLOW, api_url_of
from slime_core.config.block_names import PREFIX
from slime_core.config.tree import RunConfig
from slime_core.run.paths import RunPaths, store_url
from slime_core.store.backend import join_url
from slime_core.tracking.mlflow import MlflowSettings, database_uri, page_of

FLOW_RUN = """
select id from flow_run
where parent_task_run_id is null and exists (select 1 from json_each(tags) where value = ?)
order by created desc limit 1
"""
TIMEOUT_S = 5.0


def places_of(config: RunConfig, run_id: str) -> dict[str, str]:
    """Name -> path or address of everything but Prefect's page."""
    paths = RunPaths(Path(config.run.workspace).absolute(), run_id)
    found = {
        "store": join_url(store_url(config.run.workspace, config.store.store_url), run_id),
        "metrics": str(paths.local / "metrics.jsonl"),
        "logs": str(paths.logs),
    }
    if config.tracking.use_mlflow:
        found["MLflow"] = mlflow_page(config, run_id)
    return found


def mlflow_page(config: RunConfig, run_id: str) -> str:
    """Address of the run's page in MLflow, or the command that opens MLflow's page."""
    workspace = Path(config.run.workspace).absolute()
    tracking = config.tracking
    if (tracking.mlflow_tracking_uri or "").startswith(PREFIX):
        return f"at the server that {tracking.mlflow_tracking_uri} names"
    settings = MlflowSettings.choose(
        workspace, run_id, tracking.mlflow_tracking_uri, tracking.mlflow_experiment_name, {}, {}
    )
    served = settings.uri if settings.uri.startswith(("http://", "https://")) else None
    if settings.uri == database_uri(workspace) and served is None:
        service = processes.running(workspace, MLFLOW)
        served = service.address if service else None
    page = page_of(settings)
    if served is None and page and _mlflow_knows(f"http://{HOST}:{MLFLOW_PORT}", page):
        served = f"http://{HOST}:{MLFLOW_PORT}"
    if served is None:
        command = mlflow_command(config)
        return f"{command}  then /{page}" if page else command
    return f"{served.rstrip('/')}/{page or ''}"


def prefect_page(workspace: Path, run_id: str) -> str:
    """Address of the run's newest flow run, or the command that opens Prefect's pages."""
    home = workspace / "prefect"
    api_url = _api_url(workspace)
    if api_url is not None and api_answers(api_url, TIMEOUT_S):
        flow_run = _flow_run_from(api_url, run_id)
        page = api_url.removesuffix("/api")
        return f"{page}/runs/flow-run/{flow_run}" if flow_run else f"{page}/runs"
    if not (home / "prefect.db").is_file():
        return f"no Prefect server of {workspace} has ever run"
    usual = f"http://{HOST}:{PREFECT_PORT}"  # where a command that was printed serves it
    if flow_run := _flow_run_from(f"{usual}/api", run_id):
        return f"{usual}/runs/flow-run/{flow_run}"
    flow_run = _flow_run_in(home / "prefect.db", run_id)
    command = prefect_command(home)
    return f"{command}  then /runs/flow-run/{flow_run}" if flow_run else command


def own_prefect_home(workspace: Path, api_url: str | None) -> Path | None:
    """Folder of the workspace's own Prefect server, if that is the one behind an API."""
    return workspace / "prefect" if api_url and api_url == _own_api_url(workspace) else None


def _api_url(workspace: Path) -> str | None:
    chosen = configured_api_url()
    return chosen[0] if chosen else _own_api_url(workspace)


def _own_api_url(workspace: Path) -> str | None:
    """API of the server that `slime up` or a living `slime train` has in this workspace."""
    if service := api_url_of(workspace):
        return service
    home = workspace / "prefect"
    if own_server_pid(home) is None:
        return None
    port = json.loads((home / "server.pid").read_text())["port"]
    return f"http://{HOST}:{port}/api"


def _flow_run_from(api_url: str, run_id: str) -> str | None:
    wanted = {"flow_runs": {"tags": {"all_": [f"run:{run_id}"]}}}
    content = json.dumps({**wanted, "sort": "START_TIME_DESC", "limit": 1}).encode()
    request = urllib.request.Request(
        f"{api_url}/flow_runs/filter", content, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            found: list[dict[str, Any]] = json.load(response)
        return found[0]["id"] if found else None
    except (OSError, ValueError, TypeError, LookupError):  # nobody, or somebody else, is there
        return None


def _mlflow_knows(url: str, page: str) -> bool:
    """Whether a server answers for the run of a page."""
    asked = f"{url}/api/2.0/mlflow/runs/get?run_id={page.rsplit('/', 1)[-1]}"
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as response:
            return response.status == 200
    except (OSError, ValueError):
        return False


def _flow_run_in(database: Path, run_id: str) -> str | None:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as opened:
        row = opened.execute(FLOW_RUN, [f"run:{run_id}"]).fetchone()
    return row[0] if row else None
