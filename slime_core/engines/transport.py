"""HTTP/1.1 connections to one server, for hundreds of calls at once.

aiohttp rather than httpx: with 256 answers at once a call costs a fraction of the CPU.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from yarl import URL

BROKEN = aiohttp.ClientError
"""What a call raises whose connection was not opened or did not last."""

NEVER_SENT = aiohttp.ClientConnectorError
"""The part of BROKEN whose request cannot have reached the server."""


class Connections:
    """Connections that are kept for further calls. Opened in the loop of the first call.

    No deadlines here: a call has one over everything it does. No proxies from the environment, no
    cookies, no redirects.

    Attributes:
        in_flight: calls whose answer has not been read to its end.
    """

    def __init__(self, url: str, most: int, keepalive_s: float) -> None:
        """
        Args:
            url: of the server, without a path.
            most: further calls wait, until their own deadline.
            keepalive_s: after which an idle connection is not used again.
        """
        self.in_flight = 0
        self._url = url
        self._most = most
        self._keepalive_s = keepalive_s
        self._urls: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def call(self, method: str, path: str, content: bytes | None) -> tuple[int, bytes]:
        """Status and whole body of an answer.

        Raises:
            BROKEN: there was none.
        """
        async with self.answer(method, path, content) as answer:
            return answer.status, await answer.read()

    @asynccontextmanager
    async def answer(
        self, method: str, path: str, content: bytes | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer whose body is still to be read. A block that is left before its end closes
        the connection, which tells the server that nobody waits any more."""
        headers = {"content-type": "application/json"} if content is not None else None
        self.in_flight += 1
        try:
            async with self._opened().request(
                method, self._absolute(path), data=content, headers=headers, allow_redirects=False
            ) as answer:
                yield answer
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        """Ends all connections, for good: a call that comes later raises BROKEN."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:  # else its connections would stay open behind the caller's back
            raise aiohttp.ClientConnectionError(f"the client of {self._url} was closed")
        if self._session is None:
            options: Mapping[str, Any] = {
                "timeout": aiohttp.ClientTimeout(total=None, sock_connect=None),
                "cookie_jar": aiohttp.DummyCookieJar(),
            }
            connector = aiohttp.TCPConnector(
                limit=self._most, keepalive_timeout=self._keepalive_s, use_dns_cache=True
            )
            self._session = aiohttp.ClientSession(connector=connector, **options)
        return self._session

    def _absolute(self, path: str) -> URL:
        """A path as a parsed URL, made once."""
        if path not in self._urls:
            self._urls[path] = URL(f"{self._url}{path}", encoded=True)
        return self._urls[path]


async def lines(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The lines of a body as they come. They may be of any length: aiohttp's own reader of lines
    refuses long ones, and an event with all log-probs is long."""
    rest = b""
    async for part in answer.content.iter_any():
        whole, newline, rest_of_part = part.rpartition(b"\n")
        if not newline:
            rest += part
            continue
        for line in (rest + whole).split(b"\n"):
            yield line.rstrip(b"\r").decode()
        rest = rest_of_part
    if rest:
        yield rest.decode()
