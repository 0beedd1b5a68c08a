"""Metrics as a projection of ledgers: never doubled, never missing.

The store says what there is to tell. metrics.jsonl holds what was projected, and one background
thread per tracker brings its lines to the tracker, in order, for as long as that takes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from slime_core.errors import MissingError, SlimeError
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.documents import Document, read_document
from slime_core.tracking.jsonl import MetricsFile
from slime_core.tracking.projection import Record, evaluation_record, iteration_record
from slime_core.waits import Deadline

log = logging.getLogger(__name__)
RETRY_FIRST_S, RETRY_MOST_S = 1.0, 30.0


class TrackerAway(SlimeError):
    """The tracker cannot be reached now; the record is sent again later."""


class TrackerRefused(SlimeError):
    """The tracker will not take our records, however often we ask."""


class Tracker(Protocol):
    """A place that metrics are sent to. Everything is called in one background thread."""

    name: str

    def connect(self) -> None:
        """Opens the run there and learns what it has. Raises TrackerAway or TrackerRefused."""
        ...

    def has(self, record: Record) -> bool:
        """True if the tracker holds the record from an earlier process."""
        ...

    def send(self, record: Record) -> None:
        """Hands over one record, all or nothing. Raises TrackerAway or TrackerRefused."""
        ...

    def finish(self, status: str) -> None:
        """Closes the run there: FINISHED, FAILED or KILLED."""
        ...


class Outbox:
    """Projects what the store holds into metrics.jsonl and from there to the trackers.

    Args:
        folder: local folder of the run; metrics.jsonl stands in it.
        store: backend at the run's prefix.
        rollout_gpus: GPUs (on CPU: processes) of all engines, for the throughput.
        trackers: where the records go besides the file.
        untrained: the run has no trainer, so an iteration ends with its batch.
        clock: Unix time.
    """

    def __init__(
        self,
        folder: Path,
        store: Backend,
        rollout_gpus: int = 1,
        trackers: Sequence[Tracker] = (),
        clock: Callable[[], float] = time.time,
        untrained: bool = False,
    ) -> None:
        self._last_document = "batch" if untrained else "ledger"
        self.file = MetricsFile(folder / "metrics.jsonl")
        self._store = store
        self._rollout_gpus = rollout_gpus
        self._clock = clock
        self._senders = [_Sender(tracker, self.file) for tracker in trackers]
        for sender in self._senders:
            sender.start()

    def catch_up(self) -> int:
        """Projects every iteration and evaluation that metrics.jsonl lacks; returns how many."""
        known = self.file.keys
        records: list[Record] = []
        for entry in self._store.list(layout.ITERATIONS):
            found = layout.parse_iteration(entry.key)
            if found and found[1] == self._last_document and _iteration_key(found[0]) not in known:
                records.append(self._iteration(found[0]))
        for entry in self._store.list(layout.EVALS):
            key = entry.key.removesuffix(".json")
            if key != entry.key and key not in known:
                records.append(self._evaluation(entry.key))
        return sum(self._append(record) for record in sorted(records, key=_order))

    def iteration(self, k: int) -> dict[str, float]:
        """Projects iteration k, which has all its documents, and returns its metrics."""
        record = self._iteration(k)
        self._append(record)
        return record.metrics

    def evaluations(self, prefix: str) -> dict[str, float]:
        """Projects every evaluation below a prefix (one weight version) and returns all metrics."""
        metrics: dict[str, float] = {}
        for entry in self._store.list(prefix):
            if entry.key.endswith(".json"):
                metrics |= self.evaluation(entry.key)
        return metrics

    def evaluation(self, key: str) -> dict[str, float]:
        """Projects the evaluation document at `key` and returns its metrics."""
        record = self._evaluation(key)
        self._append(record)
        return record.metrics

    def close(self, status: str, timeout_s: float) -> list[str]:
        """Sends what is left, within a deadline.

        Returns:
            One sentence for each tracker that does not have everything.
        """
        deadline = Deadline("metrics to reach the trackers", timeout_s)
        for sender in self._senders:
            sender.finish(status)
        sentences = [sender.left_over(deadline) for sender in self._senders]
        self.file.close()
        return [sentence for sentence in sentences if sentence]

    def _append(self, record: Record) -> bool:
        if not self.file.append(record):
            return False
        for sender in self._senders:
            sender.wake()
        return True

    def _iteration(self, k: int) -> Record:
        batch = read_document(self._store, layout.batch(k))
        untrained = self._last_document == "batch"
        ledger = None if untrained else read_document(self._store, layout.ledger(k))
        sync = self._optional(layout.sync(k))
        return iteration_record(
            _iteration_key(k),
            k,
            self._clock(),
            batch.body,
            batch.by,
            (ledger.body, ledger.by) if ledger else None,
            (sync.body, sync.by) if sync else None,
            self._rollout_gpus,
        )

    def _evaluation(self, key: str) -> Record:
        document = read_document(self._store, key)
        return evaluation_record(key.removesuffix(".json"), self._clock(), document.body)

    def _optional(self, key: str) -> Document | None:
        try:
            return read_document(self._store, key)
        except MissingError:
            return None


def _iteration_key(k: int) -> str:
    return layout.ledger(k).removesuffix("/ledger.json")


def _order(record: Record) -> tuple[int, bool, str]:
    """Iterations and evaluations as they happened: weights of step n are scored before batch n."""
    return record.step, record.is_iteration, record.key


class _Sender(threading.Thread):
    """Brings the lines of metrics.jsonl to one tracker."""

    def __init__(self, tracker: Tracker, file: MetricsFile) -> None:
        super().__init__(name=f"tracker {tracker.name}", daemon=True)
        self._tracker = tracker
        self._file = file
        self._wake = threading.Condition()
        self._news = True
        self._status: str | None = None
        self._offset = 0
        self._sent = 0
        self._trouble = ""

    def wake(self) -> None:
        with self._wake:
            self._news = True
            self._wake.notify()

    def finish(self, status: str) -> None:
        """Asks the thread to end once everything is sent."""
        with self._wake:
            self._status = status
            self._wake.notify()

    def left_over(self, deadline: Deadline) -> str:
        """Waits for the end; returns what is wrong, in a sentence, or nothing."""
        self.join(deadline.remaining_s)
        left = sum(1 for _ in self._file.read(self._offset))
        if not self.is_alive() and not self._trouble and not left:
            return ""
        reason = self._trouble or "it did not answer in time"
        return (
            f"{self._tracker.name} lacks {left} of {left + self._sent} records: {reason}; they are "
            f"safe in {self._file.path} and are sent when the run is started again"
        )

    def run(self) -> None:
        try:
            complete = self._persist(self._tracker.connect)
            while complete:
                complete = self._drain()
                if complete and self._wait_for_news():
                    self._tracker.finish(self._status or "FINISHED")
                    return
        except TrackerRefused as error:
            self._trouble = str(error)
            log.error("%s: %s", self._tracker.name, error)
        except TrackerAway as error:
            self._trouble = str(error)
        except Exception as error:  # nobody else hears of a thread's end
            self._trouble = f"unexpected {type(error).__name__}: {error}"
            log.exception("%s gets nothing more of this run", self._tracker.name)

    def _wait_for_news(self) -> bool:
        """Waits for more lines; True when the run is over and all is sent."""
        with self._wake:
            self._wake.wait_for(lambda: self._news or self._status is not None)
            over = not self._news
            self._news = False
            return over

    def _drain(self) -> bool:
        for record, offset in self._file.read_with_offsets(self._offset):
            if not self._tracker.has(record) and not self._persist(
                lambda record=record: self._tracker.send(record)
            ):
                return False
            self._offset = offset
            self._sent += 1
        return True

    def _persist(self, action: Callable[[], None]) -> bool:
        """Repeats an action while the tracker is away; once more when the run has ended."""
        pause_s, failures = RETRY_FIRST_S, 0
        while True:
            last_try = self._status is not None
            try:
                action()
            except TrackerAway as error:
                failures += 1
                self._trouble = str(error)
                if failures == 1:
                    log.warning("%s is away (%s); will try again", self._tracker.name, error)
                if last_try:
                    return False
                with self._wake:
                    self._wake.wait_for(lambda: self._status is not None, pause_s)
                pause_s = min(2 * pause_s, RETRY_MOST_S)
            else:
                if failures:
                    log.warning("%s is back after %d failures", self._tracker.name, failures)
                self._trouble = ""
                return True
