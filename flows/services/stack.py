"""Starting and ending the four parts: Prefect's server, the set-up in it, a worker, MLflow."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flows.server import HOST, api_answers, server_environment
from flows.services import processes
from flows.services.environment import mlflow_environment, prefect_environment
from flows.services.ports import listener
from flows.services.processes import Service, ServiceError
from slime_core.errors import DeadlineError
from slime_core.tracking.mlflow import database_uri
from slime_core.waits import poll

SERVER, WORKER, MLFLOW = "server", "worker", "mlflow"
TITLES = {SERVER: "Prefect", WORKER: "worker", MLFLOW: "MLflow"}
PREFECT_PORT, MLFLOW_PORT = 4200, 5000
START_TIMEOUT_S = 120.0
STOP_GRACE_S = {WORKER: 40.0, MLFLOW: 5.0, SERVER: 8.0}
PROJECT_FILE = "prefect.yaml"
CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Plan:
    """What `slime up` is to start.

    Attributes:
        workspace: absolute folder of the runs.
        prefect_port, mlflow_port: None takes those of the last time, else the usual ones.
        pool: name of the work pool.
        at_once: runs that the worker may hold at the same time.
    """

    workspace: Path
    prefect_port: int | None = None
    mlflow_port: int | None = None
    pool: str = "slime"
    at_once: int = 1

    @property
    def project(self) -> Path:
        """The folder whose prefect.yaml is deployed, and in which its flows run."""
        here = Path.cwd()
        folder = here if (here / PROJECT_FILE).is_file() else CHECKOUT
        if not (folder / PROJECT_FILE).is_file():
            raise ServiceError(f"{here} holds no {PROJECT_FILE}: go to the checkout of slime-flow")
        return folder


def api_url_of(workspace: Path) -> str | None:
    """The API of the workspace's Prefect server, if that is a service that lives."""
    server = processes.running(workspace, SERVER)
    return f"{server.address}/api" if server else None


def start_server(plan: Plan) -> Service | None:
    """Starts Prefect's server without waiting for it; None if it runs already."""
    if processes.running(plan.workspace, SERVER):
        return None
    _refuse_beside_a_run(plan.workspace)
    wanted = _port(plan.workspace, SERVER, plan.prefect_port, PREFECT_PORT)
    home = plan.workspace / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    with listener(wanted, "Prefect's page", "--prefect-port") as bound:
        port = bound.getsockname()[1]
        return processes.start(
            plan.workspace,
            SERVER,
            [sys.executable, "-m", "flows.server_app", "--fd", str(bound.fileno())],
            environment=server_environment(home, port),
            address=f"http://{HOST}:{port}",
            port=port,
            pass_fds=(bound.fileno(),),
        )


def start_mlflow(plan: Plan) -> Service | None:
    """Starts MLflow's page without waiting for it; None if it runs already."""
    if processes.running(plan.workspace, MLFLOW):
        return None
    wanted = _port(plan.workspace, MLFLOW, plan.mlflow_port, MLFLOW_PORT)
    with listener(wanted, "MLflow's page", "--mlflow-port") as bound:
        port = bound.getsockname()[1]
    folder = plan.workspace / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port)]
    command += ["--backend-store-uri", database_uri(plan.workspace), "--workers", "1"]
    command += ["--default-artifact-root", str(folder / "artifacts")]
    return processes.start(
        plan.workspace, MLFLOW, command,
        environment=mlflow_environment(), address=f"http://{HOST}:{port}", port=port, cwd=folder,
    )  # fmt: skip


def start_worker(plan: Plan, api_url: str) -> Service | None:
    """Starts a worker of the pool; None if one runs already."""
    if processes.running(plan.workspace, WORKER):
        return None
    command = [sys.executable, "-m", "flows.services.worker_app", "--pool", plan.pool]
    command += ["--limit", str(plan.at_once)]
    return processes.start(
        plan.workspace, WORKER, command,
        environment=prefect_environment(plan.workspace, api_url),
        address=f"pool {plan.pool}", cwd=plan.project,
    )  # fmt: skip


def deploy(plan: Plan, api_url: str) -> None:
    """Deploys every entry of prefect.yaml into the pool, without a question.

    Raises:
        ServiceError: Prefect refused; its words are quoted.
    """
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    command += ["--pool", plan.pool]
    try:
        done = subprocess.run(
            command, cwd=plan.project, env=prefect_environment(plan.workspace, api_url),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ServiceError(
            f"deploying {plan.project / PROJECT_FILE} took longer than {START_TIMEOUT_S:.0f} s"
        ) from error
    if done.returncode:
        raise ServiceError(
            f"deploying {plan.project / PROJECT_FILE} failed:\n{done.stdout}{done.stderr}"
        )


def wait_answers(workspace: Path, service: Service) -> None:
    """Waits until a service with a port answers.

    Raises:
        ServiceError: it ended, or does not answer in time; the end of its log is quoted.
    """
    title = TITLES[service.name]

    def ready() -> bool | None:
        if not service.alive:
            raise ServiceError(f"{title} ended at its start; {_quoted(workspace, service.name)}")
        return _answers(service) or None

    try:
        poll(title, START_TIMEOUT_S, ready, interval_s=0.2)
    except DeadlineError as error:
        raise ServiceError(
            f"{title} does not answer on {service.address} after {START_TIMEOUT_S:.0f} s; "
            f"{_quoted(workspace, service.name)}"
        ) from error


def stop_all(workspace: Path, before: Callable[[Service], None]) -> Iterator[Service]:
    """Ends the services that live, the worker first and the server last; gives each that ended.

    Args:
        before: called with the worker before it ends its runs and itself.
    """
    for name in (WORKER, MLFLOW, SERVER):
        service = processes.running(workspace, name)
        if service is None:
            continue
        if name == WORKER:
            before(service)
        if processes.stop(service, STOP_GRACE_S[name]):
            yield service


def _answers(service: Service) -> bool:
    if service.name == SERVER:
        return api_answers(f"{service.address}/api")
    try:
        with urllib.request.urlopen(f"{service.address}/health", timeout=1) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError, ValueError):
        return False


def _port(workspace: Path, name: str, asked: int | None, usual: int) -> int:
    if asked is not None:
        return asked
    last = processes.recorded(workspace, name)
    return last.port if last is not None and last.port else usual


def _refuse_beside_a_run(workspace: Path) -> None:
    """Two servers on one database would each keep half of the events."""
    from flows.server import own_server_pid

    pid = own_server_pid(workspace / "prefect")
    if pid is not None:
        raise ServiceError(
            f"a `slime train` in {workspace} has the Prefect server of this workspace (process "
            f"{pid}): wait for its end or stop it, then `slime up`"
        )


def _quoted(workspace: Path, name: str) -> str:
    return f"the end of {processes.log_of(workspace, name)}:\n{processes.log_tail(workspace, name)}"
