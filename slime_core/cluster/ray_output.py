"""What Ray says in the driver goes to the run's log files instead of the terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray._private.worker as ray_worker

from slime_core.run.logs import DETAILS


class _ToDetails(logging.Handler):
    """Passes records on to the run's log files."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(DETAILS).handle(record)


def log_to_details() -> Callable[[], None]:
    """Ray reports in pages, for example each call that was waiting when we ended an actor. Two ways
    lead to the terminal, its logger and the messages of the raylet, which no option of Ray keeps
    off stdout.

    Returns:
        Call it to undo that.
    """
    logger, shown = logging.getLogger("ray"), ray_worker.print_to_stdstream
    before = list(logger.handlers)

    def keep(data: dict[str, Any], ignore_prefix: bool) -> None:
        logging.getLogger(DETAILS).error("Ray (%s): %s", data["pid"], "\n".join(data["lines"]))

    def restore() -> None:
        logger.handlers[:] = before
        ray_worker.print_to_stdstream = shown

    logger.handlers[:] = [_ToDetails()]
    ray_worker.print_to_stdstream = keep
    return restore
