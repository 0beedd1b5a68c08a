"""Rewards from an HTTP server: `remote_rm`."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from slime_core.rewards.result import ScoreFailure

RETRIED_STATUS = (408, 425, 429)


@dataclass(frozen=True)
class RemoteSettings:
    """Where and how a remote grader is asked.

    Attributes:
        url: gets `{"prompt", "response", "label"}` by POST; answers a JSON number or object.
        concurrency: requests under way at most.
        attempts: tries a sample at most, all within its deadline.
        max_backoff_s: longest pause between two tries.
    """

    url: str
    concurrency: int = 64
    attempts: int = 10
    max_backoff_s: float = 30.0


class RemoteGrader:
    """Asks a reward server, with retries within a deadline."""

    def __init__(self, settings: RemoteSettings) -> None:
        self._settings = settings
        self._client: Any = None
        self._slots = asyncio.Semaphore(settings.concurrency)

    async def grade(self, body: dict[str, Any], timeout_s: float) -> Any:
        """The server's JSON answer, or a ScoreFailure with what went wrong last."""
        failure = f"{self._settings.url} gave no answer"
        try:
            async with self._slots, asyncio.timeout(timeout_s):
                for attempt in range(self._settings.attempts):
                    if attempt:
                        pause_s = min(2.0 ** (attempt - 1), self._settings.max_backoff_s)
                        await asyncio.sleep(pause_s * random.SystemRandom().uniform(0.5, 1.0))
                    answer, failure, final = await self._ask(body, timeout_s)
                    if failure is None:
                        return answer
                    if final:
                        break
        except TimeoutError:
            return ScoreFailure("timeout", f"{failure} within {timeout_s:g} s", "")
        return ScoreFailure("remote", str(failure), "")

    async def close(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _ask(self, body: dict[str, Any], timeout_s: float) -> tuple[Any, str | None, bool]:
        """(answer, failure or None, whether trying again is of no use)."""
        import httpx

        if self._client is None:
            limits = httpx.Limits(max_connections=self._settings.concurrency)
            self._client = httpx.AsyncClient(limits=limits, trust_env=False, timeout=timeout_s)
        url = self._settings.url
        try:
            response = await self._client.post(url, json=body)
        except httpx.HTTPError as error:
            return None, f"{url}: {type(error).__name__} {error}", False
        if response.status_code != 200:
            final = 400 <= response.status_code < 500
            final = final and response.status_code not in RETRIED_STATUS
            return None, f"{url} answered {response.status_code}: {response.text[:200]}", final
        try:
            return response.json(), None, True
        except ValueError:
            return None, f"{url} answered no JSON: {response.text[:200]}", True
