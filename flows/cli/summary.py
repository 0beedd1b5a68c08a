"""What a command says at its end: where everything is, and what opens it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.config.tree import RunConfig
from slime_core.run.paths import store_url
from slime_core.store.backend import join_url
from slime_core.tracking.mlflow import MlflowSettings

if TYPE_CHECKING:
    from flows.launch import Launch
    from flows.server import OwnServer

MLFLOW_PORT, PREFECT_PORT = 5000, 4200


def summary(
    config: RunConfig, launch: Launch | None, server: OwnServer | None, stopped: bool
) -> list[str]:
    """Lines for the terminal.

    Args:
        launch: None where the run did not come to its start.
        server: our own Prefect server, which has ended.
        stopped: a person stopped the run.
    """
    if launch is None:
        return []
    url = join_url(store_url(config.run.workspace, config.store.store_url), launch.run_id)
    how = "stopped; the same command goes on" if stopped else "finished"
    lines = [
        f"run {launch.run_id} {how}",
        f"  store    {url}",
        f"  metrics  {launch.session.paths.local / 'metrics.jsonl'}",
        f"  logs     {launch.session.paths.logs}",
    ]
    if config.tracking.use_mlflow:
        lines.append(f"  MLflow   {mlflow_command(config)}")
    if server is not None:
        lines.append(f"  Prefect  {prefect_command(server.home)}")
    return [*lines, *(f"  note: {sentence}" for sentence in launch.left_over)]


def mlflow_command(config: RunConfig) -> str:
    """The command that opens MLflow's page, or its address where a server keeps the run."""
    uri = MlflowSettings.choose(
        Path(config.run.workspace), "", config.tracking.mlflow_tracking_uri, None, {}, {}
    ).uri
    if uri.startswith(("http://", "https://")):
        return uri
    command = f"{program('mlflow')} ui --backend-store-uri {shlex.quote(_short(uri))}"
    return f"{command} --port {MLFLOW_PORT}   (http://127.0.0.1:{MLFLOW_PORT})"


def prefect_command(home: Path) -> str:
    """The command that opens the workspace's Prefect pages."""
    place = shlex.quote(_relative(home))
    command = f"PREFECT_HOME={place} {program('prefect')} server start --port {PREFECT_PORT}"
    return f"{command}   (http://127.0.0.1:{PREFECT_PORT})"


def program(name: str) -> str:
    """The program beside this Python, as short as it can be typed from here."""
    return shlex.quote(_relative(Path(sys.executable).parent / name))


def _relative(path: Path) -> str:
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short


def _short(uri: str) -> str:
    scheme, _, path = uri.partition("sqlite:///")
    return f"sqlite:///{_relative(Path(path))}" if not scheme and path else uri
