"""The generation engines of a run: started, watched, quarantined and restarted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from slime_core.cluster.spawner import EngineServer
from slime_core.engines.client import EngineClient
from slime_core.engines.health import HealthRules, HealthWatch
from slime_core.errors import DeadlineError, EngineError
from slime_core.waits import Deadline, together

log = logging.getLogger(__name__)
HEALTH = HealthRules(interval_s=5.0, timeout_s=20.0, max_failures=3)


@dataclass
class Engine:
    """One engine and what happened to it.

    Attributes:
        name: engine-0, engine-1, ...
        process: its server.
        client: talks to the server.
        quarantined: why it may not be used; None while it may.
        restarts: how often it was started anew in this stage.
        pardons: how often in this stage it was found good after a request had failed.
        watch: counts health checks in a row that it did not answer.
    """

    name: str
    process: EngineServer
    client: EngineClient
    watch: HealthWatch
    quarantined: str | None = None
    restarts: int = 0
    pardons: int = 0


@dataclass(frozen=True)
class PoolLimits:
    """Budgets of a pool.

    Attributes:
        restarts: of one engine in one stage.
        health: when an engine that lives but does not answer counts as failed.
    """

    start_timeout_s: float
    restarts: int
    health: HealthRules = HEALTH


@dataclass
class EnginePool:
    """All engines of a run.

    Args:
        spawn: index -> (process, client), not started yet. Called again for each restart.
        size: engines.

    Attributes:
        restarted: restarts of all engines since the pool was made.
    """

    spawn: Callable[[int], tuple[EngineServer, EngineClient]]
    size: int
    limits: PoolLimits
    engines: list[Engine] = field(default_factory=list)
    restarted: int = 0

    def start(self) -> None:
        """Starts all servers, without waiting. Call it in the main thread: servers die with
        the thread that started them."""
        for index in range(self.size):
            process, client = self.spawn(index)
            process.start()
            watch = self._watch(process, client)
            self.engines.append(Engine(f"engine-{index}", process, client, watch))

    async def ready(self) -> None:
        """Waits until every engine answers; an engine that died is named with its log's end."""
        deadline = Deadline("engines to come up", self.limits.start_timeout_s)
        await together(
            asyncio.to_thread(e.process.wait_healthy, deadline.remaining_s) for e in self.engines
        )

    @property
    def usable(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.quarantined is None]

    @property
    def urls(self) -> list[str]:
        """Addresses that rollout workers may send requests to."""
        return [engine.client.url for engine in self.usable]

    def clients(self) -> dict[str, EngineClient]:
        """Engine name -> client of every engine whose process lives, quarantined or not: a sync
        brings all of them to one version."""
        return {engine.name: engine.client for engine in self.engines if engine.process.alive}

    def quarantine(self, name: str, why: str) -> None:
        """Takes an engine out of use until a sync has verified it."""
        log.warning("%s is quarantined: %s", name, why)
        self._named(name).quarantined = why

    def admit(self, name: str) -> None:
        """Puts a verified engine into use."""
        engine = self._named(name)
        engine.quarantined, engine.watch.failures = None, 0

    async def watch_health(self) -> None:
        """Asks usable engines at intervals whether they answer, until it is cancelled. What it
        finds stands in their `watch`."""
        while True:
            await asyncio.sleep(self.limits.health.interval_s)
            await asyncio.gather(*(engine.watch.check() for engine in self.usable))

    def renew_budgets(self) -> None:
        """Begins a stage: every engine may be restarted as often as configured."""
        for engine in self.engines:
            engine.restarts = engine.pardons = 0

    def can_restart(self, engine: Engine) -> bool:
        """Whether its budget for this stage has something left."""
        return engine.restarts < self.limits.restarts

    async def restart(self, engine: Engine) -> None:
        """Starts an engine anew, again where it does not come up, as far as its budget goes. It
        stays quarantined until verified.

        Raises:
            EngineError: its budget is spent.
        """
        why = engine.quarantined or "it ended"
        while self.can_restart(engine):
            engine.quarantined = "restarting"
            engine.restarts += 1
            self.restarted += 1
            await engine.client.close()
            await asyncio.to_thread(engine.process.terminate)
            engine.process, engine.client = self.spawn(self.engines.index(engine))
            engine.watch = self._watch(engine.process, engine.client)
            engine.process.start()
            try:
                limit_s = self.limits.start_timeout_s
                await asyncio.to_thread(engine.process.wait_healthy, limit_s)
                return
            except (EngineError, DeadlineError) as error:
                why = str(error)
                log.warning("%s did not come up: %s", engine.name, error)
        engine.quarantined = (
            f"its budget of {self.limits.restarts} restarts a stage (engine_restarts) is spent: "
            f"{why}"
        )
        raise EngineError(f"{engine.name}: {engine.quarantined}; log: {engine.process.log_path}")

    async def close(self) -> None:
        """Ends all servers."""
        try:
            await asyncio.gather(*(asyncio.to_thread(e.process.terminate) for e in self.engines))
        finally:
            for engine in self.engines:
                await engine.client.close()
            self.engines.clear()

    def _watch(self, process: EngineServer, client: EngineClient) -> HealthWatch:
        return HealthWatch(client, self.limits.health, lambda: process.alive)

    def _named(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)
