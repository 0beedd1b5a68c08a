"""What a start prepares before its first iteration, with Prefect or without it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_core.config.loading import load_config
from slime_core.config.tree import RunConfig
from slime_core.run.identity import RunChoice, choose_run
from slime_core.run.paths import store_url
from slime_core.store.backend import open_backend
from tasks._run import BOUND, Bound, Report, Stages

if TYPE_CHECKING:
    from slime_core.cluster.session import Session
    from slime_core.run.recover import Recovery

log = logging.getLogger(__name__)


class LogReport:
    """Shows progress as log lines, where no terminal is watched."""

    def say(self, text: str) -> None:
        log.info("%s", text)

    def stage(self, name: str, iteration: int) -> None:
        """Stages log their own line when they end."""

    def start(self) -> None:
        """Nothing to time."""

    def iteration(self, k: int, metrics: dict[str, float]) -> None:
        log.info("iteration %06d: reward %s", k, metrics.get("rollout/raw_reward"))

    def evaluation(self, metrics: dict[str, float]) -> None:
        log.info("evaluation: %s", metrics)


@dataclass
class Launch:
    """A chosen run whose processes are starting.

    Attributes:
        choice: which run, and whether it existed.
        session: its processes.
        report: where progress is shown.
        finished: all iterations are done.
    """

    config: RunConfig
    choice: RunChoice
    session: Session
    report: Report = field(default_factory=LogReport)
    stages: Stages | None = None
    finished: bool = False

    @classmethod
    def current(cls) -> Launch | None:
        """What the command line has prepared, if it started the flow."""
        return LAUNCH.get()

    @classmethod
    def start(cls, config: RunConfig, overrides: dict[str, Any], resume: str) -> Launch:
        """Chooses the run and starts its processes without waiting. Call it in the main thread."""
        from slime_core.cluster.session import Session

        if overrides:
            config = load_config(config.model_dump(), overrides)
        choice = choose(config, resume)
        return cls(config, choice, Session.start(config, choice.run_id))

    @property
    def run_id(self) -> str:
        return self.choice.run_id

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Bound]:
        """Waits for the processes, binds the run, and ends everything afterwards."""
        reason = "failed"
        try:
            context = await self.session.ready()
            run = Bound(context, self.stages or Stages.real(), self.report)
            token = BOUND.set(run)
            try:
                yield run
            finally:
                BOUND.reset(token)
            reason, self.finished = "finished", True
        except asyncio.CancelledError:
            reason = "interrupted"
            raise
        finally:
            await self.session.close(reason)

    def tell(self, recovery: Recovery) -> None:
        """Shows what recovery did."""
        if recovery.resumed:
            width = max(len(name) for name, _ in recovery.table)
            for name, value in recovery.table:
                self.report.say(f"  {name:<{width}}  {value}")


LAUNCH: ContextVar[Launch | None] = ContextVar("slime_launch", default=None)


def choose(config: RunConfig, resume: str) -> RunChoice:
    """Which run this start means."""
    root = open_backend(store_url(config.run.workspace, config.store.store_url))
    return choose_run(root, config, resume)
