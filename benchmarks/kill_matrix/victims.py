"""Finding the processes of a run from outside, and killing them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil

CASE_VARIABLE = "SLIME_KILL_MATRIX_CASE"
"""Set to a case's workspace in everything that the case starts."""

ROLES = {
    "engine": lambda words: "slime_core.engines.embedded" in words,
    "trainer": lambda words: words[0].startswith("ray::TrainerActor"),
    "rollout": lambda words: words[0].startswith("ray::RolloutActor"),
    "gcs": lambda words: words[0].endswith("/gcs_server"),
    "raylet": lambda words: words[0].endswith("/raylet"),
    "prefect": lambda words: "flows.server_app" in words,
}
TOGETHER = {"head": ("gcs", "raylet")}


def below(pid: int) -> list[psutil.Process]:
    """All descendants of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def victims(pid: int, victim: str) -> list[int]:
    """The processes to kill; empty as long as one of them is not there yet.

    Args:
        pid: the command of the run.
    """
    if victim == "flow":
        return [pid]
    descendants = below(pid)
    if victim == "everything":
        return [*(process.pid for process in descendants), pid]
    found: list[int] = []
    for role in TOGETHER.get(victim, (victim,)):
        of_role = [process.pid for process in descendants if _has_role(process, role)]
        if not of_role:
            return []
        found += of_role
    return found


def kill(pids: list[int]) -> None:
    """SIGKILL to all of them, at once as far as one can."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked(workspace: Path) -> list[int]:
    """Living processes that a case has started, by the mark in their environment."""
    mark = f"{CASE_VARIABLE}={workspace}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def alive(processes: Iterable[psutil.Process]) -> list[int]:
    """Those that have not ended; a zombie has."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _has_role(process: psutil.Process, role: str) -> bool:
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return bool(words) and ROLES[role](words)
