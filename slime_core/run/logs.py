"""Log files of the processes of a run."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOGGERS = ("slime_core", "flows", "tasks")
DETAILS = "slime_core.details"
"""Logger of what stands in the log files only; a person is told the same in a sentence."""


def log_to_file(path: Path, level: str) -> Callable[[], None]:
    """Sends this process's log lines of slime-flow to a file (appending).

    Returns:
        Call it to stop, in a process that goes on to something else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.setLevel(level)
        logger.addHandler(handler)

    def stop() -> None:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()

    return stop


def print_to_file(path: Path) -> None:
    """Sends what this process prints from now on (standard output and error, also of the processes
    that it starts) to a file (appending). Functions of users print, and nobody reads what Ray
    keeps of that until the run has ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(file, number)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    os.close(file)
