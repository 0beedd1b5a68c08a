"""Ends what a killed run leaves behind.

Ray's agents look for their raylet only every few seconds and then wait for a server that is gone
(seen: still there after 20 s). This process waits for the run's own process to end, however it
ends, and then kills every process that carries the run's mark.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MARK = "SLIME_RAY_FOLDER"
GRACE_S = 3.0
SWEEP_S = 20.0
POLL_S = 0.05


@contextlib.contextmanager
def marking(folder: str) -> Iterator[None]:
    """What this process starts inside of the block carries the mark, and so do its children."""
    os.environ[MARK] = folder
    try:
        yield
    finally:
        del os.environ[MARK]


def start(folder: str) -> subprocess.Popen[bytes]:
    """Starts a reaper for this process.

    Args:
        folder: Ray's temporary folder of this run; its name is the mark. The reaper removes it.
    """
    command = [sys.executable, "-I", "-S", str(Path(__file__)), "--parent-pid", str(os.getpid())]
    return subprocess.Popen(
        [*command, "--mark", folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def is_reaper(command: Sequence[str]) -> bool:
    """Whether a process with this command line is a reaper."""
    return str(Path(__file__)) in command


def wait_for_end(pid: int) -> None:
    """Blocks until a process has ended. The only wait here without a deadline: it is the point."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    poller.poll()


def marked(mark: str) -> list[int]:
    """Processes, other than this one, that carry the mark in their environment or hold a file
    below the folder open (a process that renames itself overwrites its environment)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if _in_environment(entry, mark) or _holds_file_below(entry, mark):
                found.append(int(entry.name))
    return found


def sweep(mark: str, grace_s: float) -> bool:
    """Waits for every marked process to end and kills those that do not; True once none is left.

    Args:
        grace_s: how long they may take to end by themselves.
    """
    start_s = time.monotonic()
    while left := marked(mark):
        waited_s = time.monotonic() - start_s
        if waited_s > SWEEP_S:
            return False
        if waited_s > grace_s:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return True


def _in_environment(process: Path, mark: str) -> bool:
    return f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0")


def _holds_file_below(process: Path, folder: str) -> bool:
    for link in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith(f"{folder}/"):
                return True
    return False


def main(argv: list[str] | None = None) -> int:
    """Waits, then sweeps; 0 if nothing marked is left."""
    parser = argparse.ArgumentParser(prog="reaper")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--mark", required=True)
    options = parser.parse_args(argv)
    wait_for_end(options.parent_pid)
    if not sweep(options.mark, GRACE_S):
        return 1
    shutil.rmtree(options.mark, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
