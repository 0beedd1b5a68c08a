"""A Prefect server of our own: it lives as long as the run and keeps its data in the workspace.

The server that Prefect starts by itself outlives a killed flow, and with its default settings on
SQLite an iteration waits about two seconds for the database (docs/operating.md has the numbers).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import tomllib
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil

from slime_core.errors import SlimeError
from slime_core.waits import Deadline, poll

HOST = "127.0.0.1"
LOG_TAIL_LINES = 15
STOP_TIMEOUT_S = 5.0
PR_SET_PDEATHSIG = 1

WRITER_SETTINGS = {"BATCH_SIZE": "2000", "READ_BATCH_SIZE": "50", "FLUSH_INTERVAL": "5"}
BATCHED_WRITERS = {
    f"PREFECT_SERVER_SERVICES_{service}_{setting}": value
    for service in ("TASK_RUN_RECORDER", "EVENT_PERSISTER")
    for setting, value in WRITER_SETTINGS.items()
}
"""Settings without which a Prefect server on SQLite answers 503 during a run."""

QUIET = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
PATIENCE = {"PREFECT_CLIENT_MAX_RETRIES": "3", "PREFECT_API_REQUEST_TIMEOUT": "20"}
"""A run goes on without an API that is away, so its client gives up sooner than usual (14 s)."""
ALIVE = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
"""Seconds between the signs of life that the server's automation listens for."""
LOGS = {
    "PREFECT_LOGGING_EXTRA_LOGGERS": "slime_core,flows,tasks",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}
"""Our log lines stand in the run's log, too."""


class ServerError(SlimeError):
    """The Prefect server did not start, or went away."""


def configured_api_url() -> tuple[str, str] | None:
    """The Prefect API that the user has chosen, and where the choice stands; None without one."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url, "PREFECT_API_URL"
    home = Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect"))
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml"))
    try:
        content = tomllib.loads(profiles.read_text(encoding="utf-8"))
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return None
    except tomllib.TOMLDecodeError as error:
        raise ServerError(f"{profiles}: is not valid TOML: {error}") from error
    name = os.environ.get("PREFECT_PROFILE", content.get("active"))
    url = content.get("profiles", {}).get(name, {}).get("PREFECT_API_URL")
    return (url, f"profile {name} in {profiles}") if url else None


def api_answers(url: str, timeout_s: float = 1.0) -> bool:
    """True if the API at `url` (it ends with /api) says that it is healthy."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError, ValueError):
        return False


def die_with_parent(parent_pid: int) -> None:
    """Makes this process get SIGTERM when the thread that started it ends; for main() of a child.

    Linux ties the signal to the *thread*, so a parent starts such children in its main thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(f"the process {parent_pid} that started this one is gone")


@dataclass
class OwnServer:
    """A running (or starting) server process.

    Attributes:
        home: folder of its database, log and pid file.
        port: where it listens on the loopback address.
    """

    home: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def api_url(self) -> str:
        return f"{self.url}/api"

    @property
    def log_path(self) -> Path:
        return self.home / "server.log"

    @classmethod
    def start(cls, workspace: Path, port: int = 0) -> OwnServer:
        """Starts the server without waiting for it. Call it in the main thread.

        Args:
            workspace: the run's workspace; the server keeps everything in its folder `prefect`.
            port: 0 takes the port of the last time if it is free, else any free one.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ServerError(
                "start the Prefect server in the main thread: it dies with its thread"
            )
        home = workspace.resolve() / "prefect"
        try:
            home.mkdir(parents=True, exist_ok=True)
            listener = _listener(port, home)
            port = listener.getsockname()[1]
            log = (home / "server.log").open("ab")
        except OSError as error:
            raise ServerError(f"the Prefect server cannot start in {home}: {error}") from error
        command = [sys.executable, "-m", "flows.server_app"]
        command += ["--fd", str(listener.fileno()), "--parent", str(os.getpid())]
        with listener, log:
            process = subprocess.Popen(
                command,
                env=server_environment(home, port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )
        server = cls(home, port, process)
        server._pid_path.write_text(server._pid_text)
        return server

    @property
    def _pid_path(self) -> Path:
        return self.home / "server.pid"

    @property
    def _pid_text(self) -> str:
        return json.dumps({"pid": self.process.pid, "port": self.port})

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_healthy(self, timeout_s: float) -> None:
        """Waits until the API answers.

        Raises:
            ServerError: the process ended or the deadline passed; the log's end is quoted.
        """

        def ready() -> bool | None:
            if not self.alive:
                raise ServerError(
                    f"the Prefect server ended with status {self.process.returncode}; the end of "
                    f"{self.log_path}:\n{self.log_tail()}"
                )
            return api_answers(self.api_url) or None

        deadline = Deadline("the Prefect server", timeout_s)
        try:
            poll(deadline.name, timeout_s, ready)
        except SlimeError as error:
            if isinstance(error, ServerError):
                raise
            raise ServerError(
                f"the Prefect server does not answer on {self.api_url} after {timeout_s:.0f} s; "
                f"the end of {self.log_path}:\n{self.log_tail()}"
            ) from error

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def restarted(self) -> OwnServer:
        """Starts a server in place of one that ended: same port, same database."""
        return OwnServer.start(self.home.parent, self.port)

    def stop(self) -> None:
        """Ends the server; what it has accepted is written first."""
        if self.alive:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(STOP_TIMEOUT_S)
        if self._pid_path.is_file() and self._pid_path.read_text() == self._pid_text:
            self._pid_path.unlink()


def own_server_pid(home: Path) -> int | None:
    """Process of the server that a command has in this home; None where none lives."""
    try:
        pid = int(json.loads((home / "server.pid").read_text())["pid"])
        command = psutil.Process(pid).cmdline()
    except (OSError, ValueError, KeyError, psutil.Error):
        return None
    return pid if "flows.server_app" in command else None


def server_environment(home: Path, port: int) -> dict[str, str]:
    """Environment of the server process: its own home and database, no user's profile.

    Its pages must ask this server and not the one at Prefect's default port.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    return {
        **inherited,
        **QUIET,
        **BATCHED_WRITERS,
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_UI_API_URL": f"http://{HOST}:{port}/api",
    }


def client_environment(api_url: str, home: Path | None) -> dict[str, str]:
    """Environment for the Prefect client of a run.

    Args:
        api_url: the API to use.
        home: the own server's home; None keeps the user's.
    """
    own = {"PREFECT_HOME": str(home)} if home else {}
    usual = PATIENCE | ALIVE | LOGS
    chosen = {name: os.environ.get(name, value) for name, value in usual.items()}
    return {**QUIET, **chosen, **own, "PREFECT_API_URL": api_url}


def _listener(port: int, home: Path) -> socket.socket:
    """A bound socket; the child inherits it, so nobody can take the port in between."""
    if port == 0:
        try:
            last = json.loads((home / "server.port").read_text())
        except (FileNotFoundError, ValueError):
            last = 0
        candidates = [last, 0]
    else:
        candidates = [port]
    for candidate in candidates:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, candidate))
        except OSError:
            listener.close()
            continue
        (home / "server.port").write_text(json.dumps(listener.getsockname()[1]))
        return listener
    raise ServerError(f"port {port} on {HOST} is in use: choose another, or leave it to us with 0")
