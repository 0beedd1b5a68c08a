"""Functions of the user's that call sys.exit() end their own call, never the run's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slime_core.errors import PluginError


@contextmanager
def no_exit(path: str) -> Iterator[None]:
    """Wraps a call. asyncio lets SystemExit out of its loop from whatever task it is raised in, so
    it has to be caught in the task that made the call.

    Raises:
        PluginError: the function called sys.exit().
    """
    try:
        yield
    except SystemExit as error:
        raise PluginError(
            f"{path} called sys.exit({'' if error.code is None else repr(error.code)}): it must "
            "return or raise instead"
        ) from error
