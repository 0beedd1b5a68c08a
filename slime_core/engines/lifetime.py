"""Tying the life of a process to that of another."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable

POLL_INTERVAL_S = 0.5
PR_SET_PDEATHSIG = 1


def watch_parent(pid: int, on_end: Callable[[], None]) -> None:
    """Calls `on_end` on a thread of its own when process `pid` has ended.

    A parent-death signal would fire when the *thread* that started this process ends, and a pool
    thread may end long before its process. A pidfd follows the process itself.
    """
    threading.Thread(target=_watch, args=(pid, on_end), name="parent", daemon=True).start()


def _watch(pid: int, on_end: Callable[[], None]) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        on_end()
        return
    except OSError:  # an old kernel, or a sandbox that forbids it
        while _exists(pid):
            time.sleep(POLL_INTERVAL_S)
        on_end()
        return
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    poller.poll()
    on_end()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def die_with_thread() -> None:
    """Asks the kernel to kill this process when the thread that started it ends.

    For use between fork and exec, by a parent whose starting thread lives as long as itself.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
