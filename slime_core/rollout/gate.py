"""The gate before the engines: which may be used, and whether requests may leave at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from slime_core.engines.client import EngineClient
from slime_core.errors import DeadlineError

log = logging.getLogger(__name__)


class EngineGate:
    """Hands out the least busy usable engine while the gate is open.

    Args:
        connect: url -> client.
        concurrency: requests in flight per engine; more wait.
    """

    def __init__(self, connect: Callable[[str], EngineClient], concurrency: int) -> None:
        self._connect = connect
        self._concurrency = concurrency
        self._clients: dict[str, EngineClient] = {}
        self._busy: dict[str, int] = {}
        self._open = False
        self._changed = asyncio.Condition()

    async def set_engines(self, urls: list[str]) -> None:
        """Replaces the usable engines; requests in flight to others run to their end."""
        async with self._changed:
            gone = [self._clients.pop(url) for url in set(self._clients) - set(urls)]
            for url in urls:
                if url not in self._clients:
                    self._clients[url] = self._connect(url)
                    self._busy[url] = 0
            self._changed.notify_all()
        for client in gone:
            await client.close()

    async def open(self) -> None:
        async with self._changed:
            self._open = True
            self._changed.notify_all()

    async def close(self) -> None:
        async with self._changed:
            self._open = False

    async def mark_down(self, url: str, why: str) -> None:
        """Stops using an engine until `set_engines` names it again."""
        async with self._changed:
            if self._clients.pop(url, None) is not None:
                log.warning("engine %s is not used any more: %s", url, why)

    @asynccontextmanager
    async def engine(self, samples: int, wait_s: float) -> AsyncIterator[EngineClient]:
        """An engine for a request of `samples` sequences.

        Raises:
            DeadlineError: no engine was free within `wait_s`.
        """
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: self._free(samples) is not None), wait_s
                )
            except TimeoutError as error:
                state = "open" if self._open else "closed"
                raise DeadlineError(
                    f"waited {wait_s:.0f} s for a free engine (gate {state}, "
                    f"{len(self._clients)} usable engines)"
                ) from error
            url = self._free(samples)
            assert url is not None
            client = self._clients[url]
            self._busy[url] += samples
        try:
            yield client
        finally:
            async with self._changed:
                self._busy[url] -= samples
                self._changed.notify_all()

    async def aclose(self) -> None:
        await self.set_engines([])

    def _free(self, samples: int) -> str | None:
        """The least busy engine with room; one that is idle takes any request."""
        if not self._open or not self._clients:
            return None
        url = min(self._clients, key=lambda item: self._busy[item])
        busy = self._busy[url]
        return url if busy == 0 or busy + samples <= self._concurrency else None
