"""Watching an engine: how many checks in a row failed, and when that means it is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)


class Probe(Protocol):
    """The part of an EngineClient that a watch needs."""

    url: str

    async def health(self, timeout_s: float = ...) -> bool: ...


@dataclass(frozen=True)
class HealthRules:
    """When an engine counts as gone.

    Attributes:
        interval_s: pause between checks.
        timeout_s: for one check.
        max_failures: failed checks in a row that end the engine's service.
    """

    interval_s: float = 5.0
    timeout_s: float = 10.0
    max_failures: int = 3


class HealthWatch:
    """Checks one engine until it is gone.

    Attributes:
        failures: failed checks in a row.
        checks: checks in all.
    """

    def __init__(self, client: Probe, rules: HealthRules, alive: Callable[[], bool]) -> None:
        """
        Args:
            alive: whether its process runs; a process that ended is gone at the first check.
        """
        self.failures = 0
        self.checks = 0
        self._client = client
        self._rules = rules
        self._alive = alive

    @property
    def gone(self) -> bool:
        return self.failures >= self._rules.max_failures

    async def check(self) -> bool:
        """One check; True when the engine answered."""
        self.checks += 1
        if not self._alive():
            self.failures = self._rules.max_failures
            log.warning("engine %s: its process has ended", self._client.url)
            return False
        if await self._client.health(self._rules.timeout_s):
            self.failures = 0
            return True
        self.failures += 1
        log.warning(
            "engine %s: health check failed, %d of %d in a row",
            self._client.url,
            self.failures,
            self._rules.max_failures,
        )
        return False

    async def run(self, on_gone: Callable[[], Awaitable[None]]) -> None:
        """Checks until the engine is gone, then awaits `on_gone`. Cancel it to stop watching."""
        while True:
            await self.check()
            if self.gone:
                await on_gone()
                return
            await asyncio.sleep(self._rules.interval_s)
