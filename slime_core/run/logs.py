"""Log files of the processes of a run."""

from __future__ import annotations

import logging
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_file(path: Path, level: str) -> None:
    """Sends this process's log lines of slime-flow to a file (appending)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    for name in ("slime_core", "flows", "tasks"):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.addHandler(handler)
