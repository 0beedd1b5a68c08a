"""An httpx transport for hundreds of calls at once to one server.

httpcore's pool looks at every connection for every request, so its cost grows with the square of
the calls in flight (measured: 128 at once took 4 s of CPU in 1,920 calls). Here a call goes to the
least busy of several small pools.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx

POOL_SIZE = 8


class ShardedTransport(httpx.AsyncBaseTransport):
    """Small pools behind one transport.

    Attributes:
        in_flight: calls whose answer has not been read to its end.
    """

    def __init__(self, max_connections: int, keepalive_expiry_s: float) -> None:
        """
        Args:
            max_connections: further calls wait, until their own deadline.
            keepalive_expiry_s: after which an idle connection is not used again.
        """
        self.in_flight = 0
        self._limits = httpx.Limits(
            max_connections=POOL_SIZE,
            max_keepalive_connections=POOL_SIZE,
            keepalive_expiry=keepalive_expiry_s,
        )
        self._ssl = httpx.create_ssl_context(trust_env=False)
        self._room = asyncio.Semaphore(max_connections)
        self._pools: list[httpx.AsyncHTTPTransport] = []
        self._busy: list[int] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await self._room.acquire()
        index = self._take()
        try:
            answer = await self._pools[index].handle_async_request(request)
        except BaseException:
            self._give(index)
            raise
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        answer.stream = _Counted(answer.stream, self, index)
        return answer

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()

    def _take(self) -> int:
        """The least busy pool; a new one when all are full."""
        index = min(range(len(self._busy)), key=self._busy.__getitem__, default=-1)
        if index < 0 or self._busy[index] >= POOL_SIZE:
            index = len(self._pools)
            pool = httpx.AsyncHTTPTransport(verify=self._ssl, trust_env=False, limits=self._limits)
            self._pools.append(pool)
            self._busy.append(0)
        self._busy[index] += 1
        self.in_flight += 1
        return index

    def _give(self, index: int) -> None:
        self._busy[index] -= 1
        self.in_flight -= 1
        self._room.release()


class _Counted(httpx.AsyncByteStream):
    """Tells the transport when the answer is done with."""

    def __init__(self, inner: httpx.AsyncByteStream, owner: ShardedTransport, index: int) -> None:
        self._inner, self._owner, self._index = inner, owner, index
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part

    async def aclose(self) -> None:
        try:
            await self._inner.aclose()
        finally:
            if self._open:
                self._open = False
                self._owner._give(self._index)
