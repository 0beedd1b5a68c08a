"""The gate before the engines: which may be used, and whether requests may leave at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from slime_core.engines.client import EngineClient
from slime_core.errors import DeadlineError, EngineError

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


class EngineGate:
    """Hands out the least busy usable engine while the gate is open.

    Args:
        connect: url -> client.
        concurrency: sequences in flight per engine; more wait.
    """

    def __init__(self, connect: Callable[[str], EngineClient], concurrency: int) -> None:
        self._connect = connect
        self._concurrency = concurrency
        self._engines: dict[str, _Use] = {}
        self._down: dict[str, str] = {}
        self._open = False
        self._continuations = 0
        self._changed = asyncio.Condition()

    async def set_engines(self, urls: list[str]) -> None:
        """Replaces the usable engines; requests in flight to others run to their end."""
        async with self._changed:
            idle = [use for url in set(self._engines) - set(urls) if (use := self._drop(url))]
            for url in urls:
                if url not in self._engines:
                    self._engines[url] = _Use(self._connect(url))
            self._down.clear()
            self._changed.notify_all()
        for use in idle:
            await use.client.close()

    async def open(self) -> None:
        async with self._changed:
            self._open = True
            self._changed.notify_all()

    async def close(self) -> None:
        async with self._changed:
            self._open = False

    async def mark_down(self, client: EngineClient, why: str) -> None:
        """Stops using an engine until `set_engines` is called again. One that was replaced since
        the request left is not blamed."""
        url = client.url
        async with self._changed:
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
        finally:
            async with self._changed:
                use.samples -= samples
                use.requests -= 1
                over = not use.listed and not use.requests
                self._wake(samples)
            if over:
                await use.client.close()

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
        def free() -> bool:
            turn = continues or not self._continuations
            return turn and self._free(samples) is not None

        async with self._changed:
            self._continuations += continues
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(free)
            except TimeoutError as error:
                self._wake(samples)
                raise DeadlineError(self._waited(wait_s)) from error
            except asyncio.CancelledError:
                self._wake(samples)  # it may have been woken already, instead of another
                raise
            finally:
                self._continuations -= continues
                if continues:
                    self._changed.notify_all()
            use = self._free(samples, prefer)
            assert use is not None
            use.samples += samples
            use.requests += 1
            return use

    def _wake(self, samples: int) -> None:
        """Lets as many waiting requests look for room as freed sequences could serve: with
        hundreds waiting, waking all for each answer cost more than reading the answer. A request
        that goes on may stand behind others, so then all look."""
        if self._continuations:
            self._changed.notify_all()
        else:
            self._changed.notify(samples)

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
