"""What the background services find in their environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flows.server import QUIET, client_environment

WORKSPACE = "SLIME_WORKSPACE"
"""Names the workspace of the services to the runs that their worker starts."""
QUERY_S = 5
"""Seconds between a worker's questions for work. After about a minute of unanswered ones it asks
ever less often and after four it ends, so fewer seconds mean less patience with a server."""
QUIET_MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    "DO_NOT_TRACK": "true",
}


def prefect_environment(workspace: Path, api_url: str) -> dict[str, str]:
    """For the worker and for Prefect's commands: our server, the workspace's own settings."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("PREFECT_")}
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return {
        **inherited,
        "PATH": os.pathsep.join(programs),
        **client_environment(api_url, workspace.absolute() / "prefect"),
        "PREFECT_WORKER_QUERY_SECONDS": str(QUERY_S),
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_CLI_COLORS": "false",
        WORKSPACE: str(workspace.absolute()),
    }


def mlflow_environment() -> dict[str, str]:
    """For MLflow's page."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("MLFLOW_")}
    return {**inherited, **QUIET, **QUIET_MLFLOW}
