"""Waits that have a deadline and a name."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from typing import TypeVar

from slime_core.errors import DeadlineError

log = logging.getLogger(__name__)
T = TypeVar("T")


class Deadline:
    """A point in monotonic time, with the name of what is waited for."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._end

    def check(self, detail: str = "") -> None:
        """Raises DeadlineError once the deadline has passed."""
        if self.expired:
            raise DeadlineError(
                f"waited {self.seconds:.0f} s for {self.name}" + (f": {detail}" if detail else "")
            )


async def within(name: str, seconds: float, awaitable: Awaitable[T]) -> T:
    """Awaits with a deadline; raises DeadlineError that names the wait."""
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except TimeoutError as error:
        raise DeadlineError(f"waited {seconds:.0f} s for {name}") from error


class Patience:
    """A deadline for work that may also wait for its turn, which does not count.

    Attributes:
        name: of the work, for the message.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self._seconds = seconds
        self._clock = asyncio.timeout(None)
        self._pauses = 0
        self._left_s = seconds

    async def run(self, awaitable: Awaitable[T]) -> T:
        """Awaits the work; inside it, this is the `current_patience()`.

        Raises:
            DeadlineError: it took longer, pauses not counted.
        """
        token = _PATIENCE.set(self)
        try:
            async with self._clock:
                self._clock.reschedule(asyncio.get_running_loop().time() + self._seconds)
                return await awaitable
        except TimeoutError as error:
            if not self._clock.expired():
                raise  # the work's own
            raise DeadlineError(f"waited {self._seconds:.0f} s for {self.name}") from error
        finally:
            _PATIENCE.reset(token)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside does not count. Several parts of the work may wait at once."""
        loop = asyncio.get_running_loop()
        if not self._pauses:
            self._left_s = (self._clock.when() or loop.time()) - loop.time()
            self._clock.reschedule(None)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                with suppress(RuntimeError):  # the work has ended meanwhile
                    self._clock.reschedule(loop.time() + self._left_s)


_PATIENCE: ContextVar[Patience | None] = ContextVar("patience", default=None)


def current_patience() -> Patience | None:
    """The deadline that this code works under, None without one that can pause."""
    return _PATIENCE.get()


@asynccontextmanager
async def place(slots: asyncio.Semaphore | None, name: str, limit_s: float) -> AsyncIterator[None]:
    """One of so many places (None: any number); waiting for it counts for no deadline but its own.

    Raises:
        DeadlineError: none became free within `limit_s`; names the wait.
    """
    if slots is None:
        yield
        return
    patience = current_patience()
    with patience.paused() if patience is not None else nullcontext():
        clock = asyncio.timeout(limit_s)
        try:
            async with clock:  # not `within`, which may lose a place when it is cancelled
                await slots.acquire()
        except TimeoutError as error:
            raise DeadlineError(f"waited {limit_s:.0f} s for {name}") from error
    try:
        yield
    finally:
        slots.release()


async def together(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Awaits all at once. When one fails, the others are cancelled and have ended before its error
    is raised, so nothing goes on behind the caller's back."""
    tasks = [asyncio.ensure_future(item) for item in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def beside(name: str, work: Callable[[], T]) -> T:
    """The result of work in a thread of its own, with this context's variables. Unlike with
    `asyncio.to_thread`, neither the loop nor the process waits at its end for work that nobody
    waits for any more."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from now on a cancel only ends the waiting

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # it is raised where the work is awaited
            outcome.set_exception(error)

    context = copy_context()
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)


def poll(name: str, seconds: float, ready: Callable[[], T | None], interval_s: float = 0.05) -> T:
    """Calls `ready` until it returns something that is not None, or the deadline passes."""
    deadline = Deadline(name, seconds)
    while True:
        value = ready()
        if value is not None:
            return value
        deadline.check()
        time.sleep(min(interval_s, deadline.remaining_s))


async def apoll(
    name: str, seconds: float, ready: Callable[[], Awaitable[T | None]], interval_s: float = 0.05
) -> T:
    """The asynchronous twin of `poll`."""
    deadline = Deadline(name, seconds)
    while True:
        value = await ready()
        if value is not None:
            return value
        deadline.check()
        await asyncio.sleep(min(interval_s, deadline.remaining_s))
