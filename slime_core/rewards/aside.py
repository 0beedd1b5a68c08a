"""A loop and thread of its own for users' async functions, so that one that blocks holds up nobody
who generates. A thread that is stuck is left behind and another one takes its place."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from slime_core.errors import PluginError
from slime_core.plugins.user_code import is_cancelled, no_exit

log = logging.getLogger(__name__)
GRACE_S = 1.0


class AsideLoop:
    """Runs coroutines in a daemon thread, which starts when it is first needed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, call: Callable[[], Coroutine[Any, Any, Any]], limit_s: float) -> Any:
        """The value of the coroutine that `call` makes, in the caller's context.

        Raises:
            TimeoutAside: not there within the limit.
            whatever the coroutine raises.
        """
        loop = self._started()
        future = asyncio.run_coroutine_threadsafe(_within(call, limit_s), loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), limit_s + GRACE_S)
        except TimeoutAside:
            raise
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            if self._loop is loop:
                self._loop = None
            raise PluginError("the function ended the thread that it ran in") from error
        except TimeoutError as error:
            if future.done() and not future.cancelled():
                raise  # the function's own
            if self._loop is loop:
                log.error("a function blocks the thread of async rewards; it is left behind")
                self._loop = None
            raise TimeoutAside(blocked=True) from error

    async def close(self) -> None:
        """Stops the thread; one that is stuck ends with the process."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(loop.stop)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._loop.is_closed():  # a function may have stopped it
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=_serve, args=(self._loop,), name="async rewards", daemon=True
            ).start()
        return self._loop


class TimeoutAside(Exception):
    """The deadline passed.

    Attributes:
        blocked: the function did not even let go of its thread.
    """

    def __init__(self, blocked: bool = False) -> None:
        super().__init__("the deadline passed")
        self.blocked = blocked


async def _within(call: Callable[[], Coroutine[Any, Any, Any]], limit_s: float) -> Any:
    clock = asyncio.timeout(limit_s)
    try:
        async with clock:
            with no_exit("the function"):  # which would end this thread
                return await call()
    except TimeoutError as error:
        if clock.expired():
            raise TimeoutAside from error
        raise


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
