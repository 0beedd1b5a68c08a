"""Background processes of a workspace: started, found again by another command, ended.

A record `<workspace>/services/<name>.json` says who a service is. A pid alone would not: it may
belong to somebody else by the time it is read, so the record holds the start time, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slime_core.errors import ConfigError, DeadlineError, SlimeError
from slime_core.run.process import ProcessIdentity, identity_of
from slime_core.waits import poll

LOG_TAIL_LINES = 15
KILL_WAIT_S = 5.0


class ServiceError(SlimeError):
    """A background service did not start or did not end."""


@dataclass(frozen=True)
class Service:
    """One background process.

    Attributes:
        name: file name of its record and log.
        process: who it is.
        address: what a person opens, or what it works on.
        port: where it listens; 0 where it does not.
    """

    name: str
    process: ProcessIdentity
    address: str
    port: int = 0

    @property
    def alive(self) -> bool:
        """True while this very process lives."""
        return self.process.is_gone() is False


def folder_of(workspace: Path) -> Path:
    """Where records and logs of a workspace's services lie."""
    return workspace.absolute() / "services"


def log_of(workspace: Path, name: str) -> Path:
    """The log file of a service."""
    return folder_of(workspace) / f"{name}.log"


def recorded(workspace: Path, name: str) -> Service | None:
    """The service as it was last started, alive or not; None if it never was.

    Raises:
        ConfigError: the workspace cannot be read.
        ServiceError: the record is damaged.
    """
    path = folder_of(workspace) / f"{name}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        process = ProcessIdentity(**content.pop("process"))
        return Service(process=process, **content)
    except FileNotFoundError:
        return None
    except (PermissionError, NotADirectoryError) as error:
        raise ConfigError(
            f"workspace {workspace} cannot be read ({error.strerror}: {path}): choose another with "
            "--workspace"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ServiceError(
            f"{path}: cannot be read ({error}); delete it once its process has ended"
        ) from error


def running(workspace: Path, name: str) -> Service | None:
    """The service if it is alive."""
    service = recorded(workspace, name)
    return service if service is not None and service.alive else None


def start(
    workspace: Path,
    name: str,
    command: Sequence[str],
    *,
    environment: dict[str, str],
    address: str,
    port: int = 0,
    pass_fds: tuple[int, ...] = (),
    cwd: Path | None = None,
) -> Service:
    """Starts a process that outlives this one, in a session of its own, and records it.

    Raises:
        ServiceError: the workspace cannot be written.
    """
    folder = folder_of(workspace)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with log_of(workspace, name).open("ab") as log:
            process = subprocess.Popen(
                list(command),
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        service = Service(name, identity_of(process.pid), address, port)
        written = folder / f"{name}.json.new"
        written.write_text(json.dumps(asdict(service), indent=1), encoding="utf-8")
        written.replace(folder / f"{name}.json")
    except OSError as error:
        raise ServiceError(f"{name} cannot be started in {folder}: {error}") from error
    return service


def stop(service: Service, grace_s: float) -> bool:
    """Ends a service: SIGTERM, then SIGKILL for it and its process group.

    Returns:
        False if it was not alive.

    Raises:
        ServiceError: it is alive still.
    """
    if not service.alive:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(service.process.pid, signal.SIGTERM)
    if not _wait_gone(service, grace_s):
        # It leads its own group: what it started goes with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(service.process.pid, signal.SIGKILL)
        if not _wait_gone(service, KILL_WAIT_S):
            raise ServiceError(f"{service.name} (process {service.process.pid}) does not end")
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(service.process.pid, signal.SIGKILL)
    return True


def log_tail(workspace: Path, name: str) -> str:
    """The last lines of a service's log."""
    try:
        text = log_of(workspace, name).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])


def _wait_gone(service: Service, seconds: float) -> bool:
    try:
        return poll(f"the end of {service.name}", seconds, lambda: not service.alive or None)
    except DeadlineError:
        return False
