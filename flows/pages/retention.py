"""Keeps Prefect's database small: what the pages hold of a run's old iterations is deleted.

In a server of our own that happens in its SQLite file, in transactions of a few iterations, since
Prefect's API deletes no events. Another server is asked through its API, and only where the
configuration says so.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.sorting import FlowRunSort

from flows.pages.events import DONE, resource_id
from flows.prefect_api import RUN_TAG

EVENTS_KEPT = 50
"""Iterations whose events stay. Events are most of the bytes, and automations look at new ones."""
SIGNS_KEPT_S = 600.0
"""Age from which a run's own signs of life go, which come with the time and not with iterations."""
BUSY_TIMEOUT_S = 20.0
SETTLED_S, EVENTS_SETTLED_S = 20.0, 10.0
"""Ages from which nothing more comes for an iteration: the server writes task runs and events in
batches of five seconds. An event that comes later still goes with its subflow."""
NAMED = re.compile(r"iteration (\d{6,})")
ENDED = """
select child.id, child.parent_task_run_id, child.name
from flow_run parent
join task_run holder on holder.flow_run_id = parent.id
join flow_run child on child.parent_task_run_id = holder.id
where parent.parent_task_run_id is null
  and exists (select 1 from json_each(parent.tags) where value = ?)
  and child.state_type in ('COMPLETED', 'FAILED', 'CRASHED', 'CANCELLED')
  and child.name like 'iteration %' and child.name < ? and child.state_timestamp < ?
"""
WITH_EVENTS = """
  and exists (select 1 from event_resources where resource_id = 'prefect.flow-run.' || child.id)
"""
LIMIT = " order by child.name limit ?"
TOLD = """
select id from events where event = ? and resource_id = ?
  and json_extract(payload, '$.iteration') < ? order by occurred limit ?
"""
OF_ARTIFACTS = """
select event_id from event_resources
where resource_id in (select 'prefect.artifact.' || id from artifact where flow_run_id = ?)
"""
SIGNS = """
select id from events
where event in ('prefect.flow-run.heartbeat', 'prefect.artifact.updated') and occurred < ?
  and id in (
    select told.event_id from event_resources told
    join flow_run parent on told.resource_id = 'prefect.flow-run.' || parent.id
    where parent.parent_task_run_id is null
      and exists (select 1 from json_each(parent.tags) where value = ?)
      and told.occurred < ?
  )
limit ?
"""
WAL_MOST_BYTES = 2**20
"""Size to which the write-ahead log shrinks again once all of it stands in the database."""


class Pruner(Protocol):
    """Deletes what a server holds of old iterations."""

    def prune(self, run_id: str, below: int, most: int) -> int:
        """Deletes at most `most` ended iterations of a run that are numbered less than `below`.

        Returns:
            How many were deleted.
        """
        ...


@dataclass(frozen=True)
class OwnDatabase:
    """The SQLite file of a server of our own."""

    path: Path

    def prune(self, run_id: str, below: int, most: int) -> int:
        """Subflows with their task runs, states, logs, artifacts and events; then the events of
        younger ones."""
        with closing(self._opened()) as database, _immediate(database):
            old = _ended(database, run_id, below, most, SETTLED_S)
            for flow_run, holder in old:
                _delete_events(database, flow_run)
                for table in ("log", "artifact"):
                    database.execute(f"delete from {table} where flow_run_id = ?", [flow_run])
                database.execute("delete from flow_run where id = ?", [flow_run])
                database.execute("delete from task_run where id = ?", [holder])
            return len(old)

    def prune_events(self, run_id: str, below: int, most: int) -> int:
        """Deletes the events of at most `most` ended iterations that are numbered less."""
        with closing(self._opened()) as database, _immediate(database):
            old = _ended(database, run_id, below, most, EVENTS_SETTLED_S, WITH_EVENTS)
            for flow_run, _ in old:
                _delete_events(database, flow_run)
            told = database.execute(TOLD, [DONE, resource_id(run_id), below, most])
            _delete_these(database, [row[0] for row in told.fetchall()])
            before = _ago(SIGNS_KEPT_S)
            signs = database.execute(SIGNS, [before, f"{RUN_TAG}{run_id}", before, most])
            _delete_these(database, [row[0] for row in signs.fetchall()])
            return len(old)

    def _opened(self) -> sqlite3.Connection:
        uri = f"file:{self.path}?mode=rw"
        opened = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        opened.execute("pragma foreign_keys = on")  # task runs and states go with their flow run
        opened.execute(f"pragma journal_size_limit = {WAL_MOST_BYTES}")
        return opened


@dataclass(frozen=True)
class OtherServer:
    """A server of somebody else, through its API. Its events stay for as long as it keeps them."""

    client: SyncPrefectClient

    def prune(self, run_id: str, below: int, most: int) -> int:
        tag = filters.FlowRunFilterTags(all_=[f"{RUN_TAG}{run_id}"])
        parents = self.client.read_flow_runs(flow_run_filter=filters.FlowRunFilter(tags=tag))
        if not parents:
            return 0
        under = filters.FlowRunFilterParentFlowRunId(any_=[run.id for run in parents])
        oldest = self.client.read_flow_runs(
            flow_run_filter=filters.FlowRunFilter(parent_flow_run_id=under),
            sort=FlowRunSort.START_TIME_ASC,
            limit=most,
        )
        deleted = 0
        for run in oldest:
            named = NAMED.fullmatch(run.name)
            ended = run.state is not None and run.state.is_final()
            if ended and named and int(named[1]) < below:
                self._delete(run.id, run.parent_task_run_id)
                deleted += 1
        return deleted

    def _delete(self, flow_run: UUID, holder: UUID | None) -> None:
        self.client.delete_flow_run(flow_run)
        if holder is not None:
            self.client.delete_task_run(holder)


def _ended(
    database: sqlite3.Connection,
    run_id: str,
    below: int,
    most: int,
    age_s: float,
    further: str = "",
) -> list[tuple[str, str]]:
    """Flow run and task run (that stands for it in its parent) of ended iterations, oldest
    first."""
    given = [f"{RUN_TAG}{run_id}", f"iteration {below:06d}", _ago(age_s)]
    found = database.execute(f"{ENDED}{further}{LIMIT}", [*given, most]).fetchall()
    return [(flow_run, holder) for flow_run, holder, name in found if NAMED.fullmatch(name)]


def _ago(seconds: float) -> str:
    """A time in the past as the database writes it."""
    return f"{datetime.now(UTC) - timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S.%f}"


def _delete_events(database: sqlite3.Connection, flow_run: str) -> None:
    """The events of a subflow and of everything in it: each names the subflow, but for those of
    its artifacts, which name the flow run whose thread made them."""
    query = "select event_id from event_resources where resource_id = ?"
    told = database.execute(query, [f"prefect.flow-run.{flow_run}"]).fetchall()
    told += database.execute(OF_ARTIFACTS, [flow_run]).fetchall()
    _delete_these(database, [row[0] for row in told])


def _delete_these(database: sqlite3.Connection, events: list[str]) -> None:
    rows = [(event,) for event in events]
    database.executemany("delete from event_resources where event_id = ?", rows)
    database.executemany("delete from events where id = ?", rows)


@contextmanager
def _immediate(database: sqlite3.Connection) -> Iterator[None]:
    """A transaction that waits for the lock when it begins, as the server's do."""
    database.execute("begin immediate")
    try:
        yield
    except BaseException:
        database.execute("rollback")
        raise
    database.execute("commit")
