"""Joins a run to its feed: progress that is reported reaches the terminal and Prefect's pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

from prefect.settings import PREFECT_API_URL

from flows.launch import Launch
from flows.pages.events import Vitals
from flows.pages.feed import SOURCES, Done, Feed, FeedSettings
from flows.pages.places import own_prefect_home, places_of
from flows.pages.retention import OwnDatabase
from flows.prefect_api import Shown
from slime_core.run.log_lines import LogFiles
from slime_core.run.paths import RunPaths, store_url
from slime_core.store.backend import join_url, open_backend
from slime_core.store.cache import NodeCache
from tasks._run import Bound, Report

if TYPE_CHECKING:
    from slime_core.run.context import RunContext

CLOSE_S, STOP_S = 8.0, 2.0


class Watched:
    """A report that also tells the feed."""

    def __init__(self, report: Report, feed: Feed, shown: Shown, flow_run_id: UUID) -> None:
        self._report = report
        self._feed = feed
        self._shown = shown
        self._flow_run_id = flow_run_id
        self._evaluated: dict[str, float] = {}
        self.context: RunContext | None = None

    def say(self, text: str) -> None:
        self._report.say(text)

    def up(self, part: str) -> None:
        self._report.up(part)

    def stage(self, name: str, iteration: int) -> None:
        self._report.stage(name, iteration)

    def start(self) -> None:
        self._feed.begin()
        self._report.start()

    def iteration(self, k: int, metrics: dict[str, float]) -> None:
        self._report.iteration(k, metrics)
        subflow = self._shown.current or self._flow_run_id
        self._feed.done(Done(k, {**self._evaluated, **metrics}, subflow, self._vitals()))
        self._evaluated = {}

    def evaluation(self, metrics: dict[str, float]) -> None:
        self._evaluated = metrics
        self._report.evaluation(metrics)

    def _vitals(self) -> Vitals:
        if self.context is None:
            return Vitals()
        return Vitals(self.context.state.drifts, self.context.engines.restarted)


@contextmanager
def watched(launch: Launch, shown: Shown, flow_run_id: UUID) -> Iterator[Watched]:
    """Shows a launch in Prefect's pages while it runs; its report is replaced."""
    config, run_id = launch.config, launch.run_id
    paths = RunPaths.create(config.run.workspace, run_id)
    url = join_url(store_url(config.run.workspace, config.store.store_url), run_id)
    logs = LogFiles(paths.logs, SOURCES)
    if launch.choice.resumed:
        logs.skip()
    home = own_prefect_home(paths.workspace, PREFECT_API_URL.value())
    settings = FeedSettings(
        config=config,
        run_id=run_id,
        flow_run_id=flow_run_id,
        logs=logs,
        cache=NodeCache(open_backend(url, read_only=True), paths.cache),
        api_url=PREFECT_API_URL.value(),
        database=OwnDatabase(home / "prefect.db") if home else None,
        places=lambda: places_of(config, run_id),
    )
    feed = Feed(settings)
    report = Watched(launch.report, feed, shown, flow_run_id)
    launch.report = report
    feed.start()
    how = "failed"
    try:
        yield report
        how = "finished"
    except BaseException as error:
        how = "failed" if isinstance(error, Exception) else "stopped"
        raise
    finally:
        feed.close(how, STOP_S if how == "stopped" else CLOSE_S)


def watch_context(run: Bound) -> None:
    """From now on the feed sees the run's counters."""
    if isinstance(run.report, Watched):
        run.report.context = run.context
