"""Plain functions of the user's that may block: each call in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from slime_core.errors import PluginError


async def in_thread(name: str, function: Callable[[], Any]) -> Any:
    """What a function returns. It runs in the caller's context, in a daemon thread: no other work
    waits for a free one, and one that hangs ends with the process.

    Args:
        name: of the thread.

    Raises:
        whatever the function raises.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    future: asyncio.Future[Any] = loop.create_future()

    def tell(settle: Callable[[Any], None], what: Any) -> None:
        if not future.done():  # nobody waits any more
            settle(what)

    def work() -> None:
        try:
            settle, what = future.set_result, context.run(function)
        except StopIteration as error:  # a future takes any other
            settle, what = future.set_exception, RuntimeError(f"StopIteration: {error}")
        except BaseException as error:
            settle, what = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, settle, what)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await future


def bounded(name: str, function: Callable[[], Any], limit_s: float, limit: str) -> Any:
    """The same for a caller without a loop, which waits no longer than a limit.

    Args:
        limit: what the limit is called, for the message.

    Raises:
        PluginError: the function has not returned by then; its thread goes on until the process
            ends.
    """
    context, future = contextvars.copy_context(), Future[Any]()

    def work() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    if not wait([future], limit_s).done:
        raise PluginError(f"{name} did not end within {limit_s:g} s ({limit})")
    return future.result()
