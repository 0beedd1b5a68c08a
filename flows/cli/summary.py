"""What a command says at its end: where everything is, and what opens it."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.services import processes
from flows.services.stack import MLFLOW, SERVER
from slime_core.config.tree import RunConfig
from slime_core.run.paths import RunPaths, store_url
from slime_core.store.backend import join_url
from slime_core.tracking.mlflow import MlflowSettings, database_uri

HOST = "127.0.0.1"
MLFLOW_PORT, PREFECT_PORT = 5000, 4200


def summary(
    config: RunConfig, run_id: str, how: str, prefect_home: Path | None, notes: Sequence[str]
) -> list[str]:
    """Lines for the terminal.

    Args:
        how: the run came to its end, or stands.
        prefect_home: folder of the workspace's Prefect server, where that one shows the run.
        notes: sentences about metrics that did not reach a tracker.
    """
    url = join_url(store_url(config.run.workspace, config.store.store_url), run_id)
    paths = RunPaths(Path(config.run.workspace).absolute(), run_id)
    lines = [
        f"run {run_id} {how}",
        f"  store    {url}",
        f"  metrics  {paths.local / 'metrics.jsonl'}",
        f"  logs     {paths.logs}",
    ]
    workspace = Path(config.run.workspace).absolute()
    if config.tracking.use_mlflow:
        lines.append(f"  MLflow   {_mlflow_service(config, workspace) or mlflow_command(config)}")
    if prefect_home is not None:
        server = processes.running(workspace, SERVER)
        lines.append(f"  Prefect  {server.address if server else prefect_command(prefect_home)}")
    return [*lines, *(f"  note: {sentence}" for sentence in notes)]


def _mlflow_service(config: RunConfig, workspace: Path) -> str | None:
    """Address of MLflow's page that `slime up` serves, if it shows this run."""
    service = processes.running(workspace, MLFLOW)
    return service.address if service and _mlflow_uri(config) == database_uri(workspace) else None


def _mlflow_uri(config: RunConfig) -> str:
    workspace, given = Path(config.run.workspace).absolute(), config.tracking.mlflow_tracking_uri
    return MlflowSettings.choose(workspace, "", given, None, {}, {}).uri


def mlflow_command(config: RunConfig) -> str:
    """The command that opens MLflow's page, or its address where a server keeps the run."""
    uri = _mlflow_uri(config)
    if uri.startswith(("http://", "https://")):
        return uri
    command = f"{program('mlflow')} ui --backend-store-uri {shlex.quote(_short(uri))}"
    port = page_port(MLFLOW_PORT)
    return f"{command} --port {port}   (http://{HOST}:{port})"


def prefect_command(home: Path) -> str:
    """The command that opens the workspace's Prefect pages; like our own server it reports nothing
    to Prefect's makers."""
    place = shlex.quote(_relative(home))
    variables = f"PREFECT_HOME={place} PREFECT_SERVER_ANALYTICS_ENABLED=false"
    port = page_port(PREFECT_PORT)
    command = f"{variables} {program('prefect')} server start --port {port}"
    return f"{command}   (http://{HOST}:{port})"


def page_port(usual: int) -> int:
    """The usual port of a page, or another one where something listens there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, usual))
        except OSError:
            probe.bind((HOST, 0))
        return probe.getsockname()[1]


def program(name: str) -> str:
    """The program beside this Python, as short as it can be typed from here."""
    return shlex.quote(_relative(Path(sys.executable).parent / name))


def _relative(path: Path) -> str:
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short


def _short(uri: str) -> str:
    scheme, _, path = uri.partition("sqlite:///")
    return f"sqlite:///{_relative(Path(path))}" if not scheme and path else uri
