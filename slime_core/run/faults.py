"""Holds a process at a named point, so that a test can kill it at an exact moment.

Set SLIME_HOLD_AT to a point such as `generate@3` or `generate-middle@3`, or to several with commas,
and SLIME_HOLD_DIR to a folder. The process that reaches a point writes a file of that name there
(its content is the pid) and blocks until it is killed, or until somebody removes that file after
killing another process. Nothing is ever killed from inside.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from slime_core.waits import Deadline

HOLD_AT, HOLD_DIR = "SLIME_HOLD_AT", "SLIME_HOLD_DIR"
HOLD_LIMIT_S, POLL_S = 600.0, 0.05
POINTS = (
    "sample", "generate", "generate-middle", "reward", "pack", "train", "train-middle", "sync",
    "evaluate", "save-written",
)  # fmt: skip
log = logging.getLogger(__name__)


def armed(point: str, iteration: int) -> bool:
    """True if SLIME_HOLD_AT names this point."""
    return f"{point}@{iteration}" in os.environ.get(HOLD_AT, "").split(",")


def hold(point: str, iteration: int) -> None:
    """Blocks here if SLIME_HOLD_AT names this point; otherwise does nothing.

    Raises:
        DeadlineError: nobody killed or released the process within ten minutes.
    """
    if not armed(point, iteration):
        return
    name = f"{point}@{iteration}"
    log.warning("held at %s until killed or released", name)
    folder = Path(os.environ[HOLD_DIR])
    own = folder / f".{name}.{os.getpid()}"  # several ranks may come here at once
    own.write_text(str(os.getpid()), encoding="ascii")
    marker = own.rename(folder / name)  # whoever sees the file sees the pid in it
    deadline = Deadline(f"somebody to kill or release this process, held at {name}", HOLD_LIMIT_S)
    while marker.exists():
        deadline.check()
        time.sleep(POLL_S)
