"""Between HTTP and the engine thread: the pause gate, the update lock, and who waits for what."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from slime_core.engines.embedded.errors import RefusedRequestError
from slime_core.engines.embedded.parsing import GenerateCall
from slime_core.engines.embedded.request import Request
from slime_core.engines.embedded.scheduler import Scheduler
from slime_core.engines.embedded.worker import FATAL_EXIT_CODE, EngineWorker, Progress, end_process

log = logging.getLogger(__name__)
T = TypeVar("T")
News = AsyncGenerator[tuple[int, Request, int], None]
"""Index in the call, request, output tokens so far."""
Update = Callable[[Scheduler], int]
"""Changes the weights; gives the number of tensors."""


class Frontend:
    """Serves calls on the event loop. SGLang's order of things:

    New calls wait at the gate while generation is paused, and while an update runs. An update
    without a pause waits until no call is inside. Under a pause it runs at once; requests held
    inside the engine (in_place, retract) then break an update that flushes the cache.
    """

    def __init__(self, worker_of: Callable[[Callable[[Progress], None]], EngineWorker]) -> None:
        self.worker = worker_of(self._report_from_thread)
        self.finished: Callable[[Request], None] = lambda request: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = _Signal()
        self._paused = False
        self._updating = 0
        self._inside: set[_Call] = set()
        self._calls: dict[Request, _Call] = {}
        self._rids: set[str] = set()

    def start(self) -> None:
        """Starts the engine thread; called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self.worker.start()

    @property
    def paused(self) -> bool:
        return self._paused

    # -- generation

    async def generate(self, call: GenerateCall) -> list[Request]:
        """Runs a call to its end. When cancelled, its requests are aborted."""
        state = _Call(call)
        async with aclosing(self._serve(state)) as news:
            async for _ in news:
                pass
        return call.requests

    async def stream(self, call: GenerateCall) -> News:
        """Yields (index in the call, request, output tokens) as tokens arrive."""
        async with aclosing(self._serve(_Call(call))) as news:
            async for item in news:
                yield item

    async def _serve(self, state: _Call) -> News:
        requests = state.call.requests
        index = {request: i for i, request in enumerate(requests)}
        self._register(state)
        try:
            await self._state.until(lambda: not self._paused and not self._updating)
            self._inside.add(state)
            self.worker.submit(requests)
            while state.waits:
                for request, count in await state.next():
                    if state.call.stream:
                        yield index[request], request, count
        finally:
            left = {request for request in requests if self._calls.pop(request, None)}
            self._rids.difference_update(request.rid for request in requests)
            if left:
                self.worker.abort(left.__contains__)
            self._leave(state)

    def _register(self, state: _Call) -> None:
        rids = {request.rid for request in state.call.requests}
        if used := rids & self._rids:
            raise RefusedRequestError(f"rid {min(used)!r} is in use by another request")
        self._rids |= rids
        self._calls.update(dict.fromkeys(state.call.requests, state))

    def _leave(self, state: _Call) -> None:
        """The engine is done with a call, whether or not its client has read the answer."""
        self._inside.discard(state)
        self._state.notify()

    def _report_from_thread(self, progress: Progress) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver, progress)

    def _deliver(self, progress: Progress) -> None:
        for request, count in progress:
            state = self._calls.get(request)
            if state is None:
                continue
            ended = request.finish is not None and count == len(request.output)
            if ended:
                del self._calls[request]
                self.finished(request)
            state.push(request, count, ended)
            if not state.open:
                self._leave(state)

    # -- control

    async def in_engine(self, command: Callable[[Scheduler], T]) -> T:
        return await asyncio.wrap_future(self.worker.call(command))

    async def abort(self, rid: str) -> None:
        """Ends the requests whose id starts with `rid`, as SGLang does.

        As there, `rid` must be the whole id of one of them, or nothing happens.
        """
        if rid in self._rids:
            await asyncio.wrap_future(self.worker.abort(lambda r: r.rid.startswith(rid)))

    async def abort_all(self) -> None:
        await asyncio.wrap_future(self.worker.abort(lambda _: True))

    async def pause(self, mode: str) -> None:
        """Pauses; in abort mode returns once the engine is done with every call inside."""
        self._paused = True
        self._state.notify()
        if mode != "abort":
            await asyncio.wrap_future(self.worker.pause(retract=mode == "retract"))
            return
        await self.abort_all()
        await self._state.until(lambda: not self._inside)

    async def resume(self) -> None:
        await asyncio.wrap_future(self.worker.resume())
        self._paused = False
        self._state.notify()

    async def set_version(self, version: str) -> None:
        def put(scheduler: Scheduler) -> None:
            scheduler.weight_version = version

        await self.in_engine(put)

    async def slow_down(self, seconds: float) -> None:
        def put(scheduler: Scheduler) -> None:
            scheduler.step_pause_s = seconds

        await self.in_engine(put)

    async def update(
        self, update: Update, version: str | None, flush_cache: bool, abort_first: bool
    ) -> int:
        """Changes the weights between two steps.

        With `flush_cache` and requests inside the engine the process ends, as SGLang's does.

        Raises:
            RefusedWeightsError: nothing was changed.
        """

        def apply(scheduler: Scheduler) -> int:
            count = update(scheduler)
            if flush_cache and not scheduler.idle:
                log.critical("Cache flush failed after updating weights: requests are still held")
                end_process(FATAL_EXIT_CODE)
            if version is not None:
                scheduler.weight_version = version
            return count

        if abort_first:
            await self.abort_all()
        self._updating += 1
        try:
            # New calls stay out, and without a pause the ones inside may finish first.
            await self._state.until(lambda: self._paused or not self._inside)
            return await self.in_engine(apply)
        finally:
            self._updating -= 1
            self._state.notify()


class _Signal:
    """Wakes those who wait for a condition over plain state.

    All on one event loop: between a true condition and the next await nothing can change, so no
    lock is needed.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._event.wait()


class _Call:
    """What one HTTP call still waits for."""

    def __init__(self, call: GenerateCall) -> None:
        self.call = call
        self.open = len(call.requests)
        self._news: Progress = []
        self._wake = asyncio.Event()

    def push(self, request: Request, count: int, ended: bool) -> None:
        self._news.append((request, count))
        self.open -= ended
        if self.call.stream or not self.open:
            self._wake.set()

    @property
    def waits(self) -> bool:
        """True until everything was handed over by `next`."""
        return self.open > 0 or bool(self._news)

    async def next(self) -> Progress:
        await self._wake.wait()
        self._wake.clear()
        news, self._news = self._news, []
        return news
