"""Who a process is, and whether another one is proven to be gone."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessIdentity:
    """Names one process for good, also after its pid is used again.

    Attributes:
        host: for messages only; names are not unique.
        boot_id: of the kernel, which containers share. "" where the system has none.
        pid_namespace: what pids mean. "" where the system has none.
        pid: within the namespace.
        start_ticks: when it began, in clock ticks since boot.
    """

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int

    def describe(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_gone(self) -> bool | None:
        """True or False if this machine can tell, else None.

        A zombie counts as gone: it cannot write any more.
        """
        here = own_identity()
        if not here.boot_id or not here.pid_namespace:
            return None
        if (self.boot_id, self.pid_namespace) != (here.boot_id, here.pid_namespace):
            return None
        found = _state_and_start(self.pid)
        return found is None or found[0] in "ZX" or found[1] != self.start_ticks


def own_identity() -> ProcessIdentity:
    """Of the calling process."""
    return identity_of(os.getpid())


def identity_of(pid: int) -> ProcessIdentity:
    """Of a process that exists on this machine, for example a child."""
    found = _state_and_start(pid)
    return ProcessIdentity(
        host=socket.gethostname(),
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
        pid=pid,
        start_ticks=0 if found is None else found[1],
    )


def _boot_id() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # not Linux: nobody is ever proven gone, the lease runs out instead


def _pid_namespace() -> str:
    try:
        return str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """(state letter, start in ticks) of a process, None if there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])
