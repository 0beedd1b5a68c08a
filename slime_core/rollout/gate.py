"""The gate before the engines: which may be used, and whether requests may leave at all."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from slime_core.engines.client import EngineClient
from slime_core.errors import DeadlineError, EngineError
from slime_core.rollout.lanes import Lanes

log = logging.getLogger(__name__)


@dataclass
class _Use:
    """An engine as the gate uses it.

    Attributes:
        samples: sequences in flight there.
        requests: requests in flight there.
        listed: requests may be sent to it.
    """

    client: EngineClient
    samples: int = 0
    requests: int = 0
    listed: bool = True


@dataclass(frozen=True)
class _Waiter:
    """A request of `samples` sequences that waits; `turn` gets its engine, room taken already, and
    is done too when nobody waits any more. `number`: in the order in which they came."""

    number: int
    samples: int
    prefer: str | None
    turn: asyncio.Future[_Use]


class _Line:
    """Requests that wait. They have few sizes, so that the first one that fits is found without
    looking at all of them."""

    def __init__(self) -> None:
        self._by_size: dict[int, deque[_Waiter]] = {}

    def add(self, waiter: _Waiter) -> None:
        self._by_size.setdefault(waiter.samples, deque()).append(waiter)

    def first(self, fits: Callable[[int], bool] = lambda _: True) -> _Waiter | None:
        """Who came first of those whose size fits."""
        found = [self._head(size) for size in list(self._by_size) if fits(size)]
        return min((one for one in found if one), key=lambda one: one.number, default=None)

    def _head(self, size: int) -> _Waiter | None:
        waiting = self._by_size[size]
        while waiting and waiting[0].turn.done():
            waiting.popleft()
        if not waiting:
            del self._by_size[size]
        return waiting[0] if waiting else None


class EngineGate:
    """Hands out the least busy usable engine while the gate is open.

    Requests wait in a line, and whoever makes room gives it to the first that fit: a request that
    needs more room than there is holds up no smaller one. Those that go on with an aborted answer
    have a line of their own, which goes before the other.

    Args:
        connect: url -> client.
        concurrency: sequences in flight per engine; more wait.
    """

    def __init__(self, connect: Callable[[str], EngineClient], concurrency: int) -> None:
        self._lanes = Lanes()
        self._connect = connect
        self._concurrency = concurrency
        self._engines: dict[str, _Use] = {}
        self._down: dict[str, str] = {}
        self._open = False
        self._going_on = _Line()
        self._new = _Line()
        self._numbers = itertools.count()

    async def set_engines(self, urls: list[str]) -> None:
        """Replaces the usable engines; requests in flight to others run to their end."""
        idle = [use for url in set(self._engines) - set(urls) if (use := self._drop(url))]
        for url in urls:
            if url not in self._engines:
                self._engines[url] = _Use(self._connect(url))
        self._down.clear()
        self._admit()
        for use in idle:
            await use.client.close()

    async def open(self) -> None:
        self._open = True
        self._admit()

    async def close(self) -> None:
        self._open = False

    async def mark_down(self, client: EngineClient, why: str) -> None:
        """Stops using an engine until `set_engines` is called again. One that was replaced since
        the request left is not blamed."""
        url = client.url
        use = self._engines.get(url)
        if use is None or use.client is not client:
            return
        self._down[url] = why
        idle = self._drop(url)
        log.warning("engine %s is not used any more: %s", url, why)
        if idle is not None:
            await idle.client.close()

    @property
    def down(self) -> dict[str, str]:
        """Engines marked down since `set_engines`, each with the reason."""
        return dict(self._down)

    @asynccontextmanager
    async def engine(
        self, samples: int, wait_s: float, *, continues: bool = False, prefer: str | None = None
    ) -> AsyncIterator[EngineClient]:
        """An engine for a request of `samples` sequences.

        Its room is free when the block ends. What comes behind the block waits until the requests
        that other answers make room for have left.

        Args:
            continues: the request goes on with an aborted one, so it goes before new ones.
            prefer: URL of the engine that holds the beginning of the conversation; it is taken
                if it is usable and has room.

        Raises:
            DeadlineError: no engine was free within `wait_s`.
        """
        use = await self._take(samples, wait_s, continues, prefer)
        try:
            yield use.client
            await self._lanes.to_leave()
        finally:
            await self._leave(use, samples)
        await self._lanes.to_work_up()

    async def abort_all(self) -> None:
        """Ends every request in flight at the usable engines; callers get what was sampled."""
        for use in list(self._engines.values()):
            try:
                await use.client.abort_all()
            except EngineError as error:
                await self.mark_down(use.client, f"it did not abort: {error}")

    async def aclose(self) -> None:
        await self.set_engines([])

    async def _take(self, samples: int, wait_s: float, continues: bool, prefer: str | None) -> _Use:
        turn: asyncio.Future[_Use] = asyncio.get_running_loop().create_future()
        line = self._going_on if continues else self._new
        line.add(_Waiter(next(self._numbers), samples, prefer, turn))
        self._admit()
        clock = asyncio.timeout(wait_s)
        try:
            async with clock:
                return await turn
        except BaseException as error:
            if turn.cancelled():
                self._admit()  # new ones may have stood behind it
            else:
                await self._leave(turn.result(), samples)  # its turn came too late
            if isinstance(error, TimeoutError) and clock.expired():
                raise DeadlineError(self._waited(wait_s)) from error
            raise

    async def _leave(self, use: _Use, samples: int) -> None:
        """Gives room back; the last request of an engine that was replaced closes its client."""
        use.samples -= samples
        use.requests -= 1
        self._admit()
        if not use.listed and not use.requests:
            await use.client.close()

    def _admit(self) -> None:
        """Gives the room there is to those that wait, in their order."""
        for line in (self._going_on, self._new):
            while (waiter := line.first(lambda size: self._free(size) is not None)) is not None:
                use = self._free(waiter.samples, waiter.prefer)
                assert use is not None
                use.samples += waiter.samples
                use.requests += 1
                waiter.turn.set_result(use)
            if self._going_on.first() is not None:
                return  # new ones stand behind it

    def _free(self, samples: int, prefer: str | None = None) -> _Use | None:
        """The preferred engine if it has room, else the least busy one with room; one that is
        idle takes any request."""
        if not self._open or not self._engines:
            return None
        least = min(self._engines.values(), key=lambda item: item.samples)
        wanted = self._engines.get(prefer) if prefer is not None else None
        candidates = (least,) if wanted is None else (wanted, least)
        fits = (u for u in candidates if not u.samples or u.samples + samples <= self._concurrency)
        return next(fits, None)

    def _drop(self, url: str) -> _Use | None:
        """Stops using an engine; returns it if nothing is in flight there, so it can be closed."""
        use = self._engines.pop(url)
        use.listed = False
        return None if use.requests else use

    def _waited(self, wait_s: float) -> str:
        state = "open" if self._open else "closed"
        down = "".join(f"; {url} is down: {why}" for url, why in self._down.items())
        return (
            f"waited {wait_s:.0f} s for a free engine (gate {state}, {len(self._engines)} usable "
            f"engines{down})"
        )
