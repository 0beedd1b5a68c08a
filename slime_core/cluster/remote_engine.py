"""An engine that a supervisor has started, with the face of an engine process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_core.engines.launcher import TAIL_LINES
from slime_core.errors import SlimeError

log = logging.getLogger(__name__)
MARGIN_S = 15.0


class RemoteEngine:
    """Passes calls on. All methods may be called from any thread.

    Args:
        call: (method, arguments, limit_s) of the engine process there.
        status: its process, whether it lives, its exit status.
    """

    def __init__(
        self,
        url: str,
        log_path: Path,
        call: Callable[..., Any],
        status: Callable[[], tuple[int | None, bool, int | None]],
    ) -> None:
        self.url = url
        self.log_path = log_path
        self._call = call
        self._status = status

    @property
    def pid(self) -> int | None:
        """On its node."""
        return self._known()[0]

    @property
    def alive(self) -> bool:
        """False also where its supervisor has gone: the engine ends with it."""
        return self._known()[1]

    @property
    def returncode(self) -> int | None:
        return self._known()[2]

    def start(self) -> None:
        """Starts it without waiting."""
        self._call("start")

    def wait_healthy(self, deadline_s: float) -> None:
        """Blocks until it answers. Raises as EngineProcess.wait_healthy does."""
        self._call("wait_healthy", deadline_s, limit_s=deadline_s + MARGIN_S)

    def terminate(self) -> int | None:
        """Ends it; returns its exit status, None where its supervisor has gone with it."""
        try:
            return self._call("terminate")
        except SlimeError as error:
            log.info("an engine was not ended by itself: %s", error)
            return None

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of its log."""
        return self._call("log_tail", lines)

    def _known(self) -> tuple[int | None, bool, int | None]:
        try:
            return self._status()
        except SlimeError:
            return None, False, None
