"""Log lines of a command: warnings of ours to the terminal, everything else to a file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from slime_core.run.logs import DETAILS, FORMAT

OURS = ("slime_core", "flows", "tasks")


class _Said(logging.Handler):
    """Passes messages to the terminal's own lines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def filter(self, record: logging.LogRecord) -> bool:
        """Ours, without the details of what is told in a sentence."""
        ours = record.name.split(".")[0] in OURS and record.name != DETAILS
        return ours and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"{record.levelname.lower()}: {record.getMessage()}")


def quiet_console(say: Callable[[str], None], path: Path) -> None:
    """Keeps libraries off the terminal: their lines go to the file at `path`.

    Call it after Prefect was imported, since that import configures logging.
    """
    logging.raiseExceptions = False  # a log record that Prefect's API refuses is not worth a line
    to_file = logging.FileHandler(path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter(FORMAT))
    for name in (None, "prefect._internal"):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and not isinstance(
                handler, logging.FileHandler
            ):
                logger.removeHandler(handler)
        logger.addHandler(to_file)
    for name in OURS:
        logging.getLogger(name).addHandler(_Said(say))
        logging.getLogger(name).propagate = False
