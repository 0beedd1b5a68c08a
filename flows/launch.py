"""What a start prepares before its first iteration, with Prefect or without it."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from flows.order import plain_iteration, training
from slime_core import __version__
from slime_core.config.fields import field_groups, numeric_digest
from slime_core.config.tree import RunConfig
from slime_core.errors import MissingError, StoreError
from slime_core.run.ending import note_end
from slime_core.run.identity import RunChoice, choose_run
from slime_core.run.paths import RunPaths, store_url
from slime_core.run.pause import Patience, Pause
from slime_core.store.backend import Backend, join_url, open_backend
from slime_core.tracking.mlflow import MlflowSettings, MlflowTracker
from slime_core.tracking.outbox import TrackerAway
from tasks._run import BOUND, Bound, Report, Stages, run_stage

if TYPE_CHECKING:
    from slime_core.cluster.session import Session
    from slime_core.run.context import RunContext
    from slime_core.run.epoch import Lease
    from slime_core.run.recover import Recovery

log = logging.getLogger(__name__)
SAMPLES_IN_TABLE = 32
TRACKER_TIMEOUT_S = 30.0
DATA_TAG, CONFIG_TAG, COMMIT_TAG = (
    "slime.data_digest",
    "slime.config_digest",
    "mlflow.source.git.commit",
)
FINAL_WEIGHTS = "final"
TAGS_FILE = "tags.json"
GIT_TIMEOUT_S = 5.0


async def _show_nowhere(why: str | None) -> None:
    """Where nobody shows a run's state."""


class LogReport:
    """Shows progress as log lines, where no terminal is watched."""

    def say(self, text: str) -> None:
        log.info("%s", text)

    def up(self, part: str) -> None:
        log.info("%s is up", part)

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
        stages: other stages than slime_core's (benchmarks and tests).
        finished: all iterations are done.
        flow_run_id: Prefect's id of the parent flow's run.
        stop_asked: see Bound.
        left_over: sentences about metrics that did not reach a tracker.
        trackers: where metrics go besides metrics.jsonl.
        show_pause: shows why the run waits, and with None that it goes on.
    """

    config: RunConfig
    choice: RunChoice
    session: Session
    report: Report = field(default_factory=LogReport)
    stages: Stages | None = None
    finished: bool = False
    flow_run_id: UUID | None = None
    stop_asked: Callable[[], bool] = lambda: False
    left_over: list[str] = field(default_factory=list)
    trackers: list[MlflowTracker] = field(default_factory=list)
    show_pause: Callable[[str | None], Awaitable[None]] = _show_nowhere
    _closed: bool = False

    @classmethod
    def current(cls) -> Launch | None:
        """What the command line has prepared, if it started the flow."""
        return LAUNCH.get()

    @classmethod
    def start(
        cls,
        config: RunConfig,
        resume: str,
        take_over: bool = False,
        choice: RunChoice | None = None,
        report: Report | None = None,
        recorded: RunConfig | None = None,
        owned: Callable[[Lease], None] = lambda lease: None,
    ) -> Launch:
        """Chooses the run and starts its processes without waiting.

        Args:
            resume: which run to take, as `choose_run` says.
            take_over: do not wait for a silent owner.
            choice: the run, where it was chosen before.
            report: where progress is shown.
            recorded: the configuration as it was given, with the names of its blocks.
            owned: is given the run's lease before any process is started.
        """
        from slime_core.cluster.session import Session

        choice, report = choice or choose(config, resume), report or LogReport()
        trackers = trackers_of(config, choice.run_id)
        session = Session.start(
            config,
            choice.run_id,
            take_over=take_over,
            trackers=trackers,
            up=report.up,
            owned=owned,
            recorded=recorded,
        )
        return cls(
            config, choice, session, report, stop_asked=session.stop_asked, trackers=trackers
        )

    @property
    def run_id(self) -> str:
        return self.choice.run_id

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Bound]:
        """Waits for the processes, binds the run, and ends everything afterwards."""
        reason = "failed"
        try:
            context = await self.session.ready()
            if self.trackers:
                self._tag({DATA_TAG: str(context.facts["data_fingerprint"])})
            stages = self.stages or Stages.real()
            run = Bound(context, stages, self.report, self.stop_asked, self._patience())
            token = BOUND.set(run)
            try:
                yield run
                await self._keep_weights(context)
            finally:
                BOUND.reset(token)
            reason, self.finished = "finished", True
        except asyncio.CancelledError:
            reason = "interrupted"
            raise
        finally:
            await self.close(reason)

    def _patience(self) -> Patience:
        config = self.config
        return Patience(
            self.run_id,
            join_url(store_url(config.run.workspace, config.store.store_url), self.run_id),
            RunPaths.create(config.run.workspace, self.run_id).local,
            config.store.store_pause_s,
            self._tell_of_pause,
        )

    async def _tell_of_pause(self, pause: Pause | None) -> None:
        await self.show_pause(None if pause is None else pause.describe())

    def _tag(self, tags: dict[str, str]) -> None:
        """Gives trackers what only the processes know; it is kept for those that are away until
        the end, since a later start of a finished run starts no process."""
        local = RunPaths.create(self.config.run.workspace, self.run_id).local
        (local / TAGS_FILE).write_text(json.dumps(tags))
        for tracker in self.trackers:
            tracker.add_tags(tags)

    async def _keep_weights(self, context: RunContext) -> None:
        """Exports what the trainer holds at the end, for trackers, where that is asked for."""
        if not (self.config.tracking.mlflow_log_final_weights and self.trackers):
            return
        folder = context.paths.weights / FINAL_WEIGHTS
        await context.trainer.invoke("export_hf", str(folder), context.state.version)
        for tracker in self.trackers:
            tracker.add_weights(folder)

    async def close(self, reason: str) -> None:
        """Ends the processes, once.

        Args:
            reason: finished, interrupted or failed.
        """
        if not self._closed:
            self._closed = True
            self._note_end(reason)
            self.left_over = await self.session.close(reason)

    def release(self) -> None:
        """Gives the run's lease back, where its processes were killed."""
        self._note_end("interrupted")
        if self.session.lease is not None:
            self.session.lease.release()

    def _note_end(self, how: str) -> None:
        """Keeps how the flow run ended, for the case that Prefect cannot be told now."""
        if self.flow_run_id is not None:
            local = RunPaths(Path(self.config.run.workspace).absolute(), self.run_id).local
            note_end(local, str(self.flow_run_id), how)

    def tell(self, recovery: Recovery) -> None:
        """Shows what recovery did."""
        if recovery.resumed:
            width = max(len(name) for name, _ in recovery.table)
            for name, value in recovery.table:
                self.report.say(f"  {name:<{width}}  {value}")


async def plain_training(launch: Launch) -> None:
    """The whole training without Prefect."""
    async with launch.running() as run:
        recovery = await run.stages.recover(run.context)
        launch.tell(recovery)
        await training(run, recovery, run_stage, plain_iteration)


LAUNCH: ContextVar[Launch | None] = ContextVar("slime_launch", default=None)


def choose(config: RunConfig, resume: str) -> RunChoice:
    """Which run this start means."""
    root = open_backend(store_url(config.run.workspace, config.store.store_url))
    return choose_run(root, config, resume)


def store_of(config: RunConfig, run_id: str) -> Backend:
    """The store below a run's prefix."""
    return open_backend(join_url(store_url(config.run.workspace, config.store.store_url), run_id))


def deliver(config: RunConfig, run_id: str) -> list[str]:
    """Brings a finished run's metrics to trackers that were away when it ended.

    Returns:
        Sentences about metrics that still did not reach a tracker.
    """
    from slime_core.tracking.outbox import Outbox

    outbox = Outbox(
        RunPaths.create(config.run.workspace, run_id).local,
        store_of(config, run_id),
        config.cluster.rollout_num_gpus,
        trackers_of(config, run_id),
        untrained=config.debug.debug_rollout_only,
    )
    outbox.catch_up()
    return outbox.close("FINISHED", TRACKER_TIMEOUT_S)


def trackers_of(config: RunConfig, run_id: str, guest: bool = False) -> list[MlflowTracker]:
    """Where metrics go besides metrics.jsonl.

    Args:
        guest: another process brings the run there, so its state and parameters are left alone.
    """
    if not config.tracking.use_mlflow:
        return []
    location = join_url(store_url(config.run.workspace, config.store.store_url), run_id)
    params = {name: getattr(getattr(config, group), name) for name, group in field_groups().items()}
    settings = MlflowSettings.choose(
        workspace=Path(config.run.workspace),
        run_id=run_id,
        uri=config.tracking.mlflow_tracking_uri,
        experiment=config.tracking.mlflow_experiment_name,
        params={**params, "megatron": config.megatron, "sglang": config.sglang},
        tags={
            "slime.version": __version__,
            "slime.store": location,
            CONFIG_TAG: numeric_digest(config),
            **git_commit(),
        },
        system_metrics=config.tracking.mlflow_system_metrics and not guest,
    )
    settings = replace(settings, guest=guest)
    backend = open_backend(location)
    tracker = MlflowTracker(settings, lambda key: sample_rows(backend, key))
    kept = RunPaths(Path(config.run.workspace).absolute(), run_id).local / TAGS_FILE
    if kept.is_file():
        tracker.add_tags(json.loads(kept.read_text()))
    return [tracker]


def git_commit() -> dict[str, str]:
    """The commit of the working directory as MLflow's tag; nothing outside of a checkout."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {COMMIT_TAG: done.stdout.strip()} if done.returncode == 0 else {}


def sample_rows(backend: Backend, key: str) -> list[dict[str, Any]]:
    """The first samples of an evaluation for its table: none of one that was missed.

    Raises:
        TrackerAway: the store cannot be read now; the record is sent later.
    """
    from slime_core.store.evals import read_eval_samples

    try:
        samples = read_eval_samples(backend, f"{key}.arrow", SAMPLES_IN_TABLE)
    except MissingError:
        return []
    except StoreError as error:
        raise TrackerAway(f"the samples of its table cannot be read: {error}") from error
    return [
        {
            "prompt": str(sample.prompt),
            "response": sample.response,
            "label": sample.label,
            "reward": str(sample.reward),
            "status": sample.status.value,
        }
        for sample in samples
    ]
