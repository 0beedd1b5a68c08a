"""Rollout workers as Ray actors, addressed as one; also the gate of the weight sync."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray
from ray.exceptions import RayActorError

from slime_core.cluster.calls import answer
from slime_core.cluster.place import Place
from slime_core.cluster.spawner import Spawner
from slime_core.errors import EngineError
from slime_core.refs import Ref
from slime_core.rollout.settings import EvalJob, RolloutSettings
from slime_core.run.logs import print_to_file

log = logging.getLogger(__name__)
CONTROL_TIMEOUT_S = 30.0
OPTIONS: dict[str, Any] = {"num_cpus": 0.0, "max_restarts": 0, "max_concurrency": 64}


class RolloutActor:
    """One rollout worker in a process of its own."""

    def __init__(self, settings: RolloutSettings, place: Place | None = None) -> None:
        """
        Args:
            place: what the process has to take over where it is no child of the run's own.
        """
        if place is not None:
            place.take()
        self._settings = settings
        self._worker: Any = None

    async def setup(self) -> dict[str, Any]:
        """Loads tokenizer, data and graders; returns their digests."""
        from slime_core.rollout.heap import settle_heap
        from slime_core.rollout.worker import RolloutWorker  # imports transformers

        print_to_file(self._settings.log_file.with_suffix(".out"))
        self._worker = RolloutWorker(self._settings)
        facts = await self._worker.setup()
        settle_heap()
        log.info("the rollout worker is ready: prompts %s", facts["prompts"])
        return facts

    async def invoke(self, method: str, *args: Any) -> Any:
        """Calls a method of the worker; a stage leaves a line in the log."""
        start_s = time.monotonic()
        answer = await getattr(self._worker, method)(*args)
        if isinstance(answer, Ref):
            seconds = time.monotonic() - start_s
            log.info(
                "%s: %s, %d rows, %d tokens, %.2f s",
                method, answer.uri, answer.rows, answer.tokens, seconds,
            )  # fmt: skip
        return answer


class RolloutGroup:
    """All rollout workers. One worker so far. One that dies is started anew and given what it
    needs, as often in a stage as an engine; what it had stored is not made again.

    Args:
        spawner: makes its process.
        settings: what a worker needs.
        start_timeout_s: deadline of its set-up.
        stage_timeout_s: deadline of a generation or an evaluation.
    """

    def __init__(
        self,
        spawner: Spawner,
        settings: RolloutSettings,
        start_timeout_s: float,
        stage_timeout_s: float,
    ) -> None:
        self._spawner = spawner
        self._settings = settings
        self._start_timeout_s = start_timeout_s
        self._stage_timeout_s = stage_timeout_s
        self._restarts_most = settings.config.fault_tolerance.engine_restarts
        self._restarts = 0
        self._repair = asyncio.Lock()
        self._actor: Any = None
        self._setup: Any = None
        self._facts: dict[str, Any] = {}
        self._epoch: int | None = None
        self._urls: list[str] = []
        self._open = False

    def start(self) -> None:
        """Creates the worker and lets it set up, without waiting."""
        self._actor = self._spawner.spawn("rollout-0", RolloutActor, OPTIONS, self._settings)
        self._setup = self._actor.setup.remote()

    async def ready(self) -> dict[str, Any]:
        """Waits for the set-up; returns the digests of tokenizer and data."""
        name = "the rollout worker to load tokenizer and data"
        [self._facts] = await answer(name, self._start_timeout_s, [self._setup], EngineError)
        return self._facts

    async def fence(self, epoch: int) -> None:
        """The worker refuses lower epochs from now on."""
        self._epoch = epoch
        await self._control("fence", epoch)

    async def close(self) -> None:
        """Closes the gate: no new request leaves."""
        self._open = False
        await self._control("close_gate")

    async def open(self) -> None:
        """Opens the gate; continuations go first."""
        self._open = True
        await self._control("open_gate")

    async def set_engines(self, urls: list[str]) -> None:
        """Which engines may be used from now on."""
        self._urls = urls
        await self._control("set_engines", urls)

    async def engines_down(self) -> dict[str, str]:
        """Engines that failed a request since `set_engines`: url -> why."""
        return await self._control("engines_down")

    async def sample(self, epoch: int, segment: int) -> Ref:
        return await self._stage("sample", epoch, segment)

    async def generate(self, epoch: int, segment: int) -> Ref:
        return await self._stage("generate", epoch, segment)

    async def evaluate(self, epoch: int, job: EvalJob) -> Ref:
        return await self._stage("evaluate", epoch, job)

    def stop(self) -> None:
        """Ends the worker."""
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
            self._actor = None

    async def _stage(self, method: str, *args: Any) -> Ref:
        self._restarts = 0
        return await self._invoke(f"the stage {method}", self._stage_timeout_s, method, *args)

    async def _control(self, method: str, *args: Any) -> Any:
        return await self._invoke(
            f"the rollout worker's {method}", CONTROL_TIMEOUT_S, method, *args
        )

    async def _invoke(self, name: str, limit_s: float, method: str, *args: Any) -> Any:
        """Calls the worker; what is asked of it may be asked again, so a new one is asked where
        the first died over it."""
        while True:
            actor = self._actor
            try:
                pending = [actor.invoke.remote(method, *args)]
                return (await answer(name, limit_s, pending, EngineError))[0]
            except EngineError as error:
                if not isinstance(error.__cause__, RayActorError) or self._actor is None:
                    raise
                await self._replace(actor, error)

    async def _replace(self, dead: Any, error: EngineError) -> None:
        """Starts a worker in place of one that died, unless another call has.

        Raises:
            EngineError: the budget of the stage is spent, or the prompts have changed meanwhile.
        """
        async with self._repair:
            if self._actor is not dead:
                return
            if self._restarts >= self._restarts_most:
                raise error
            self._restarts += 1
            log.warning("the rollout worker died; starting it anew (%d of %d in this stage)",
                        self._restarts, self._restarts_most)  # fmt: skip
            before = self._facts
            self.start()
            if await self.ready() != before:
                raise EngineError(
                    "the rollout worker was started anew and found other prompts or another "
                    "tokenizer than before: put the files back, then start the run again"
                ) from error
            steps = [("set_engines", (self._urls,))]
            steps += [("fence", (self._epoch,))] if self._epoch is not None else []
            steps += [("open_gate", ())] if self._open else []
            for method, args in steps:
                pending = [self._actor.invoke.remote(method, *args)]
                await answer(f"the new rollout worker's {method}", CONTROL_TIMEOUT_S, pending,
                             EngineError)  # fmt: skip
