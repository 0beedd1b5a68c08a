"""Says which function of the user's holds the event loop, while it does."""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

log = logging.getLogger(__name__)
BLOCKED_S = 1.0
"""A loop that answers nobody for so long makes all other samples wait."""
OURS = (str(Path(__file__).parents[1]), *{sysconfig.get_paths()[name] for name in
        ("stdlib", "platstdlib", "purelib", "platlib")}, "<frozen")  # fmt: skip

TURN = "_run_once"
"""One turn of asyncio's loop: what stands below it in the stack does not run in the loop."""


class LoopWatch:
    """Watches the running loop from a thread.

    Args:
        blocked_s: how long the loop may answer nobody.

    Attributes:
        told: what was said so far: (file, function), each once.
    """

    def __init__(self, blocked_s: float = BLOCKED_S) -> None:
        self.told: set[tuple[str, str]] = set()
        self._blocked_s = blocked_s
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._blocked_s):
            answered = threading.Event()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # it has ended
                return
            if not answered.wait(self._blocked_s):
                self._tell(sys._current_frames().get(self._loop_thread))

    def _tell(self, frame: FrameType | None) -> None:
        """Logs the innermost frame of the user's, if the loop is in one."""
        while frame is not None and frame.f_code.co_filename.startswith(OURS):
            frame = None if frame.f_code.co_name == TURN else frame.f_back
        if frame is None:
            return
        file, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if (file, function) in self.told:
            return
        log.warning(
            "%s (%s, line %d) has held the event loop for more than %g s: nothing else is "
            "generated or graded meanwhile. Await what takes long (asyncio.sleep, an async HTTP "
            "client, asyncio.to_thread), or make it a plain `def`, which gets a thread of its own",
            function, file, frame.f_lineno, self._blocked_s,
        )  # fmt: skip
        self.told.add((file, function))
