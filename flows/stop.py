"""Ctrl-C: the first asks the run to end cleanly, the second kills."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import psutil

log = logging.getLogger(__name__)
CLEAN_END_S = 9.0
STOPPING = "stopping: ending the stage, flushing what is finished (again to kill)"
INTERRUPTED = 130
TERMINATED = 143


class Stopper:
    """Handles SIGINT and SIGTERM of the command.

    Before the run's loop is there a signal raises KeyboardInterrupt. Then the first one cancels the
    run, and if that does not end within nine seconds, or a second one comes, every process of ours
    is killed.
    """

    def __init__(self) -> None:
        self._cancel: Callable[[], object] | None = None
        self.exit_code: int | None = None

    def install(self) -> None:
        """Takes the signals. Ray and Prefect set handlers of their own, so call it again later."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def watch(self, task: asyncio.Task[Any]) -> None:
        """From now on the first signal cancels this task."""
        loop = asyncio.get_running_loop()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        self.install()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.exit_code is not None:
            kill_everything(self.exit_code)
        self.exit_code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        timer = threading.Timer(CLEAN_END_S, kill_everything, (self.exit_code,))
        timer.daemon = True
        timer.start()
        # Past Python's streams: a handler may run in the middle of a print, which must not be
        # entered again, and the loop may be busy.
        os.write(1, f"\n{STOPPING}\n".encode())
        if self._cancel is None:
            raise KeyboardInterrupt
        self._cancel()


def kill_everything(exit_code: int) -> None:
    """Kills all descendants of this process, then ends it."""
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(exit_code)
