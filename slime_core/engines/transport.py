"""An httpx transport for hundreds of calls at once to one server.

httpcore's pool looks at every connection several times for every request, so its cost grows with
the square of the calls in flight (measured: 128 at once cost 3 ms of CPU each). Here each call
takes a connection of its own off a stack.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator

import httpx


class StackTransport(httpx.AsyncBaseTransport):
    """Single connections, the last used first, behind one transport.

    Attributes:
        in_flight: calls whose answer has not been read to its end.
    """

    def __init__(
        self, max_connections: int, keepalive_expiry_s: float, verify: ssl.SSLContext
    ) -> None:
        """
        Args:
            max_connections: further calls wait, until their own deadline.
            keepalive_expiry_s: after which an idle connection is not used again.
            verify: shared by all connections; loading certificates takes 20 ms.
        """
        self.in_flight = 0
        self._limits = httpx.Limits(
            max_connections=1, max_keepalive_connections=1, keepalive_expiry=keepalive_expiry_s
        )
        self._verify = verify
        self._room = asyncio.Semaphore(max_connections)
        self._all: set[httpx.AsyncHTTPTransport] = set()
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await self._room.acquire()
        one = self._take()
        try:
            answer = await one.handle_async_request(request)
        except BaseException:
            await self._give(one, usable=False)
            raise
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        answer.stream = _Returned(answer.stream, self, one)
        return answer

    async def aclose(self) -> None:
        for one in self._all:
            await one.aclose()

    def _take(self) -> httpx.AsyncHTTPTransport:
        self.in_flight += 1
        if self._idle:
            return self._idle.pop()
        one = httpx.AsyncHTTPTransport(verify=self._verify, trust_env=False, limits=self._limits)
        self._all.add(one)
        return one

    async def _give(self, one: httpx.AsyncHTTPTransport, usable: bool) -> None:
        """Takes a connection back. One whose call broke off is closed, not used again: what is
        still to come on it, or what its pool still waits for, would meet the next call."""
        self.in_flight -= 1
        self._room.release()
        if usable:
            self._idle.append(one)
            return
        self._all.discard(one)
        await one.aclose()


class _Returned(httpx.AsyncByteStream):
    """An answer that gives its connection back when it is closed."""

    def __init__(
        self, inner: httpx.AsyncByteStream, owner: StackTransport, one: httpx.AsyncHTTPTransport
    ) -> None:
        self._inner, self._owner, self._one = inner, owner, one
        self._open, self._complete = True, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part
        self._complete = True

    async def aclose(self) -> None:
        if not self._open:
            return
        self._open = False
        usable = False
        try:
            await self._inner.aclose()
            # A cancelled close leaves its pool waiting for ever: only a finished one counts.
            usable = self._complete
        finally:
            await self._owner._give(self._one, usable)
