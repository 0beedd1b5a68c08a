"""The thread that brings a run's logs, artifacts and events to Prefect beside the iterations."""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate, LogCreate

from flows.pages import artifacts, events
from flows.pages.retention import EVENTS_KEPT, OtherServer, OwnDatabase, Pruner
from flows.prefect_api import API_ERRORS
from flows.server import api_answers
from slime_core.config.tree import RunConfig
from slime_core.run.log_lines import LogFiles, LogLine, chosen
from slime_core.store.cache import NodeCache
from slime_core.words import counted

log = logging.getLogger(__name__)
TICK_S = 2.0
PROGRESS_S = 5.0
PRUNE_S, PRUNE_MOST = 1.0, 20
WAITING_MOST = 200
SOURCES = ("supervisor", "trainer", "rollout", "engine")
INFO = 20


@dataclass(frozen=True)
class FeedSettings:
    """What a feed shows, and where.

    Attributes:
        api_url: Prefect's API; None asks no server whether it is there.
        database: of a server of our own; None where the server is somebody else's.
        places: name -> path or address, for the summary.
    """

    config: RunConfig
    run_id: str
    flow_run_id: UUID
    logs: LogFiles
    cache: NodeCache
    api_url: str | None
    database: OwnDatabase | None
    places: Callable[[], dict[str, str]] = dict


@dataclass(frozen=True)
class Done:
    """An iteration that has ended: its metrics, its subflow, the counters at its end."""

    k: int
    metrics: dict[str, float]
    flow_run_id: UUID
    vitals: events.Vitals


@dataclass
class _Told:
    """What the feed remembers of what it has told."""

    vitals: events.Vitals = field(default_factory=events.Vitals)
    newest: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    progress: UUID | None = None
    progress_s: float = 0.0
    pruned_s: float = 0.0
    logs_s: float = field(default_factory=time.monotonic)
    away: bool = False
    dropped: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class Feed(threading.Thread):
    """Brings news to Prefect in the background; what fails there is logged and left out.

    The iterations hand over what is known and go on, so they never wait for it.
    """

    def __init__(self, settings: FeedSettings) -> None:
        super().__init__(name="prefect feed", daemon=True)
        self._settings = settings
        self._source = events.EventSource(settings.run_id, settings.flow_run_id)
        self._news: queue.Queue[Done | str] = queue.Queue(WAITING_MOST)
        self._told = _Told()
        self._context = copy_context()
        self._moved_s: float | None = None
        self._stalled = False

    def begin(self) -> None:
        """Iterations come from now on: the time until the next one counts."""
        self._moved_s, self._stalled = time.monotonic(), False

    def done(self, news: Done) -> None:
        """Takes an iteration; one too many waits where Prefect is slow, and is left out."""
        self.begin()
        try:
            self._news.put_nowait(news)
        except queue.Full:
            self._told.dropped += 1

    def close(self, how: str, timeout_s: float) -> None:
        """Sends what is left and the summary, within a deadline.

        Args:
            how: finished, interrupted or failed.
        """
        try:
            self._news.put(how, timeout=timeout_s if self.is_alive() else 0)
        except queue.Full:
            log.warning("Prefect is too slow: the end of the run is not shown in an artifact")
            return
        self.join(timeout_s)

    def run(self) -> None:
        """The thread's body."""
        self._context.run(self._work)

    def _work(self) -> None:
        with get_client(sync_client=True) as client:
            pruner = self._pruner(client)
            while True:
                news = self._next()
                if self._reachable():
                    self._tell(client, pruner, news)
                if isinstance(news, str):
                    return

    def _tell(
        self, client: SyncPrefectClient, pruner: Pruner | None, news: Done | str | None
    ) -> None:
        """Everything that is due after a piece of news, or after a while without one."""
        over = isinstance(news, str)
        if isinstance(news, Done):
            self._attempt("iteration", lambda: self._iteration(client, news))
        self._attempt("logs", lambda: self._send_logs(client, over))
        if isinstance(news, str):
            self._attempt("summary", lambda: self._summary(client, news))
            return
        self._attempt("stall", self._look_for_stall)
        if pruner is not None:
            self._attempt("retention", lambda: self._prune(pruner))

    def _next(self) -> Done | str | None:
        try:
            return self._news.get(timeout=TICK_S)
        except queue.Empty:
            return None

    def _reachable(self) -> bool:
        """Asks only after a failure, so that a server that is there costs no further request."""
        if self._told.away and self._settings.api_url is not None:
            self._told.away = not api_answers(self._settings.api_url)
        return not self._told.away

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (*API_ERRORS, sqlite3.Error) as error:
            self._told.away = self._settings.api_url is not None
            log.warning("Prefect did not take the %s of the run: %s", what, error)
        except Exception as error:  # nobody foresaw it; what comes next is shown all the same
            self._note_failure(what, error)

    def _note_failure(self, what: str, error: Exception) -> None:
        """Counts what could not be shown; the first of each kind stands in the log."""
        kind = f"{what}: {type(error).__name__}"
        if kind not in self._told.failures:
            log.warning("the %s of the run cannot be shown in Prefect", what, exc_info=error)
        self._told.failures[kind] += 1

    def _iteration(self, client: SyncPrefectClient, news: Done) -> None:
        told, run_id = self._told, self._settings.run_id
        told.newest, told.metrics = news.k, {**told.metrics, **news.metrics}
        for event, payload in events.alerts(news.k, news.metrics, told.vitals, news.vitals):
            self._source.emit(event, payload)
        told.vitals = news.vitals
        self._source.emit(events.DONE, events.done(news.k, news.metrics))
        samples = artifacts.samples_or_why(self._settings.cache, news.k)
        client.create_artifact(
            ArtifactCreate(
                key=artifacts.key_of("iteration", run_id),
                type="markdown",
                description=f"{run_id}, iteration {news.k:06d}",
                data=artifacts.iteration_text(news.k, news.metrics, samples),
                flow_run_id=news.flow_run_id,
            )
        )
        self._show_progress(client, news.k)

    def _show_progress(self, client: SyncPrefectClient, k: int, last: bool = False) -> None:
        told, planned = self._told, self._settings.config.run.num_rollout
        if not last and time.monotonic() - told.progress_s < PROGRESS_S:
            return
        told.progress_s = time.monotonic()
        share = round(100 * (k + 1) / max(1, planned), 1)
        if told.progress is None:
            made = ArtifactCreate(
                key=artifacts.key_of("progress", self._settings.run_id),
                type="progress",
                description=f"{self._settings.run_id}: share of {counted(planned, 'iteration')}",
                data=share,
                flow_run_id=self._settings.flow_run_id,
            )
            told.progress = client.create_artifact(made).id
        else:
            client.update_artifact(told.progress, ArtifactUpdate(data=share))

    def _send_logs(self, client: SyncPrefectClient, last: bool) -> None:
        passed_s = time.monotonic() - self._told.logs_s
        if passed_s < TICK_S and not last:
            return
        self._told.logs_s = time.monotonic()
        rate = self._settings.config.tracking.ui_log_lines_per_s
        lines = [line for line in self._settings.logs.read() if line.level >= INFO]
        sent, left_out = chosen(lines, int(rate * max(passed_s, TICK_S)))
        flow_run = self._settings.flow_run_id
        records = [_record(line, flow_run) for line in sent]
        skipped_bytes = self._settings.logs.skipped_bytes
        if left_out or skipped_bytes:
            records.append(_note(left_out, skipped_bytes, self._settings.logs, flow_run))
        if records:
            client.create_logs(records)

    def _look_for_stall(self) -> None:
        limit_s = self._settings.config.fault_tolerance.stall_timeout_s
        if self._moved_s is None or self._stalled:
            return
        silent_s = time.monotonic() - self._moved_s
        if silent_s > limit_s:
            self._stalled = True
            newest = self._told.newest
            log.warning("no iteration has ended for %.0f s (stall_timeout_s)", silent_s)
            payload = {"iteration": newest, "silent_s": round(silent_s, 1)}
            self._source.emit(events.STALLED, payload)

    def _pruner(self, client: SyncPrefectClient) -> Pruner | None:
        tracking = self._settings.config.tracking
        if tracking.ui_keep_iterations is None:
            return None
        if self._settings.database is not None:
            return self._settings.database
        return OtherServer(client) if tracking.ui_prune_other_servers else None

    def _prune(self, pruner: Pruner) -> None:
        keep = self._settings.config.tracking.ui_keep_iterations
        if keep is None or time.monotonic() - self._told.pruned_s < PRUNE_S:
            return
        run_id, newest = self._settings.run_id, self._told.newest
        pruner.prune(run_id, newest + 1 - keep, PRUNE_MOST)
        if isinstance(pruner, OwnDatabase):
            pruner.prune_events(run_id, newest + 1 - min(keep, EVENTS_KEPT), PRUNE_MOST)
        self._told.pruned_s = time.monotonic()

    def _summary(self, client: SyncPrefectClient, how: str) -> None:
        told, run_id = self._told, self._settings.run_id
        if told.newest >= 0:
            self._show_progress(client, told.newest, last=True)
        text = artifacts.summary_text(run_id, how, told.metrics, self._settings.places())
        client.create_artifact(
            ArtifactCreate(
                key=artifacts.key_of("summary", run_id),
                type="markdown",
                description=f"{run_id}: where everything is",
                data=text,
                flow_run_id=self._settings.flow_run_id,
            )
        )
        if told.dropped:
            log.warning("%s without an artifact: Prefect was too slow",
                        counted(told.dropped, "iteration"))  # fmt: skip
        for kind, times in told.failures.items():
            log.warning("not shown in Prefect: %s, %s", kind, counted(times, "time"))


def _record(line: LogLine, flow_run_id: UUID) -> LogCreate:
    return LogCreate(
        name=f"{line.source} {line.logger}"[:200],
        level=line.level,
        message=line.message,
        timestamp=line.time,  # type: ignore[arg-type]
        flow_run_id=flow_run_id,
    )


def _note(left_out: int, skipped_bytes: int, logs: LogFiles, flow_run_id: UUID) -> LogCreate:
    """Says what was left out, and where it is."""
    passed = f" and {skipped_bytes / 1000:.0f} kB" if skipped_bytes else ""
    return LogCreate(
        name="slime",
        level=INFO,
        message=f"{left_out} further lines{passed} stand only in {logs.folder}",
        timestamp=datetime.now(UTC),  # type: ignore[arg-type]
        flow_run_id=flow_run_id,
    )
