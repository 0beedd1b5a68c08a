"""Ctrl-C and SIGTERM: the first asks the run to end cleanly, the second kills.

It is the first thing that the command loads, so what it imports is small.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import psutil

from slime_core.cluster.reaper import is_reaper

if TYPE_CHECKING:
    import asyncio

CLEAN_END_S = 9.0
GIVE_BACK_S = 2.0
STOPPING = "stopping: ending the stage, flushing what is finished (again to kill)"
GOES_ON = "stopped; the same command goes on"
INTERRUPTED = 130
TERMINATED = 143
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopper:
    """Owns SIGINT and SIGTERM while it is entered. Enter it in the main thread.

    Ray and Prefect ask for handlers of their own while they start and at every flow. Theirs end
    the process with another status, or raise wherever the loop happens to be, so `signal.signal`
    passes over what is asked for these two signals.

    Until there is a task to cancel nothing is worth keeping, and an exception could come up in the
    middle of anything: a signal ends every process of ours at once. Then the first one cancels the
    task. If that does not end within `clean_end_s`, or a second one comes, everything is killed.

    Args:
        at_once: what was said of a signal without a task. False lets it wait for the task, which is
            then cancelled before it begins: for a run whose end somebody else must be told.
        clean_end_s: seconds after the first signal at which everything is killed.

    Attributes:
        exit_code: of the command, once a signal has come.
    """

    def __init__(self, *, at_once: bool = True, clean_end_s: float = CLEAN_END_S) -> None:
        self._at_once = at_once
        self._clean_end_s = clean_end_s
        self._cancel: Callable[[], object] | None = None
        self._give_back: Callable[[], object] | None = None
        self._before: dict[int, Any] = {}
        self._signal = signal.signal
        self.exit_code: int | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self._signal = signal.signal
        for number in SIGNALS:
            signal.signal(number, self._handle)
        signal.signal = self._pass_over
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal = self._signal
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch(self, task: asyncio.Task[Any], give_back: Callable[[], object] | None = None) -> None:
        """From now on the first signal cancels this task. Call it in the task's loop.

        Args:
            give_back: called where the task does not end in time and everything was killed: gives
                back what the run holds elsewhere.
        """
        self._give_back = give_back
        loop = task.get_loop()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if self.exit_code is not None:
            task.cancel()

    def gives_back(self, give_back: Callable[[], object]) -> None:
        """What is called before a signal without a task ends everything: the run is owned already,
        and is to be shown as stopped."""
        self._give_back = give_back

    def unwatch(self) -> None:
        """The task has ended, so there is nothing to cancel any more."""
        self._cancel = None

    def _pass_over(self, number: int, handler: Any) -> Any:
        """Stands for `signal.signal`."""
        return signal.getsignal(number) if number in SIGNALS else self._signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        again = self.exit_code is not None
        if self.exit_code is None:
            self.exit_code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        if again:
            kill_everything(self.exit_code)
            return
        if self._cancel is None and self._at_once:
            kill_everything(self.exit_code, self._give_back)
            return
        timer = threading.Timer(
            self._clean_end_s, kill_everything, (self.exit_code, self._give_back)
        )
        timer.daemon = True
        timer.start()
        write(STOPPING)
        if self._cancel is not None:
            self._cancel()


def kill_everything(exit_code: int, give_back: Callable[[], object] | None = None) -> None:
    """Kills all descendants of this process, then ends it. The reaper stays until it has found
    what was started meanwhile, and has removed Ray's folder.

    Args:
        give_back: called in between; it is not waited for longer than two seconds.
    """
    write(GOES_ON)
    for child in psutil.Process().children(recursive=True):
        try:
            if not is_reaper(child.cmdline()):
                child.kill()
        except psutil.Error:
            continue
    if give_back is not None:
        giving = threading.Thread(target=give_back, daemon=True)
        giving.start()
        giving.join(GIVE_BACK_S)
    os._exit(exit_code)


def write(text: str) -> None:
    """Writes a line past Python's streams: a handler may run in the middle of a print, which must
    not be entered again. Where nobody reads any more (a closed pipe or terminal) the stop goes on.
    """
    with suppress(OSError):
        os.write(1, f"\n{text}\n".encode())
