"""What functions of the user's may raise, so that it costs their own call and never the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from slime_core.errors import PluginError


@contextmanager
def no_exit(path: str) -> Iterator[None]:
    """Wraps a call. What asyncio takes for the end of its loop or of a task is caught in the task
    that made the call: sys.exit(), and the cancellation of something that the function awaited.

    Raises:
        PluginError: the function did either.
    """
    try:
        yield
    except SystemExit as error:
        raise PluginError(
            f"{path} called sys.exit({'' if error.code is None else repr(error.code)}): it must "
            "return or raise instead"
        ) from error
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise PluginError(
            f"{path} raised CancelledError: something that it awaited was cancelled"
        ) from error


def raised(error: BaseException) -> str:
    """What an error of the user's is and says; its own text may raise again."""
    try:
        text = str(error)
    except Exception:
        text = "(its text raises an error itself)"
    return f"{type(error).__name__}: {text}"


def is_cancelled() -> bool:
    """Whether somebody ends the task that runs."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop here
        return False
    return task is not None and task.cancelling() > 0
