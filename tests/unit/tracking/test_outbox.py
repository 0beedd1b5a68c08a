"""The outbox tells each tracker everything once, through absences and kills."""

import json
import threading
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.store.backend import MemoryBackend
from slime_core.tracking import outbox as module
from slime_core.tracking.outbox import Outbox, TrackerAway, TrackerRefused
from tests.unit.tracking.documents import write_evaluation, write_iteration


@dataclass
class Server:
    """What a tracking server keeps; `failures` holds what its next answers are."""

    records: list = field(default_factory=list)
    failures: list = field(default_factory=list)
    status: str = "RUNNING"
    asked: threading.Event = field(default_factory=threading.Event)


class Client:
    """A tracker of one process; each learns what the server has when it connects."""

    name = "test server"

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: set[str] = set()

    def _answer(self) -> None:
        self._server.asked.set()
        if self._server.failures and (failure := self._server.failures.pop(0)):
            raise failure

    def connect(self) -> None:
        self._answer()
        self._known = {record.key for record in self._server.records}

    def has(self, record) -> bool:
        return record.key in self._known

    def send(self, record) -> None:
        self._answer()
        self._server.records.append(record)

    def finish(self, status: str) -> None:
        self._server.status = status


def keys(server: Server) -> list[str]:
    return [record.key for record in server.records]


def test_iterations_and_evaluations_reach_file_and_tracker_in_order(tmp_path):
    store, server = MemoryBackend(), Server()
    box = Outbox(tmp_path, store, trackers=[Client(server)])
    box.evaluation(write_evaluation(store, 0))
    for k in range(3):
        write_iteration(store, k)
        assert box.iteration(k)["train/loss"] == 0.5
    assert box.close("FINISHED", 10) == []
    expected = ["evals/a-0/sort", *(f"iterations/{k:06d}" for k in range(3))]
    assert keys(server) == expected
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == expected
    assert server.status == "FINISHED"


def test_a_tracker_that_is_away_gets_everything_when_it_is_back(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.001)
    store = MemoryBackend()
    server = Server(failures=[TrackerAway("down")] * 5)
    box = Outbox(tmp_path, store, trackers=[Client(server)])
    for k in range(4):
        write_iteration(store, k)
        box.iteration(k)
    while server.failures:
        assert server.asked.wait(10)
        server.asked.clear()
    assert box.close("FINISHED", 10) == []
    assert keys(server) == [f"iterations/{k:06d}" for k in range(4)]


def test_a_tracker_that_stays_away_loses_nothing_and_the_next_start_sends_it(tmp_path):
    store = MemoryBackend()
    server = Server(failures=[TrackerAway("connection refused")] * 99)
    box = Outbox(tmp_path, store, trackers=[Client(server)])
    write_iteration(store, 0)
    box.iteration(0)
    [sentence] = box.close("KILLED", 10)
    assert "test server lacks 1 of 1 records: connection refused" in sentence
    assert str(tmp_path / "metrics.jsonl") in sentence

    server.failures = []
    box = Outbox(tmp_path, store, trackers=[Client(server)])
    assert box.close("FINISHED", 10) == []
    assert keys(server) == ["iterations/000000"]


def test_a_tracker_that_refuses_is_named_and_does_not_stop_the_run(tmp_path):
    store = MemoryBackend()
    server = Server(failures=[None, TrackerRefused("no such experiment")])
    box = Outbox(tmp_path, store, trackers=[Client(server)])
    for k in range(2):
        write_iteration(store, k)
        box.iteration(k)
    [sentence] = box.close("FINISHED", 10)
    assert "no such experiment" in sentence
    assert len(list(box.file.read())) == 2


def test_a_lost_local_folder_is_projected_again_without_doubles(tmp_path):
    store, server = MemoryBackend(), Server()
    box = Outbox(tmp_path / "one", store, trackers=[Client(server)])
    for k in range(3):
        write_evaluation(store, k)
        write_iteration(store, k)
    assert box.catch_up() == 6
    assert box.close("KILLED", 10) == []
    first = keys(server)

    box = Outbox(tmp_path / "two", store, trackers=[Client(server)])
    write_iteration(store, 3)
    assert box.catch_up() == 7
    assert box.catch_up() == 0
    assert box.close("FINISHED", 10) == []
    assert keys(server) == [*first, "iterations/000003"]


@settings(max_examples=30, deadline=None)
@given(
    lives=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 120),
            st.lists(st.sampled_from([None, TrackerAway("down")]), max_size=4),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_happens_each_record_arrives_once_and_in_order(tmp_path_factory, lives):
    """Each life adds iterations, loses bytes of its file in a kill, and meets a flaky tracker."""
    folder = tmp_path_factory.mktemp("run")
    store, server, total = MemoryBackend(), Server(), 0
    for iterations, torn_bytes, failures in lives:
        server.failures = list(failures)
        box = Outbox(folder, store, trackers=[Client(server)])
        box.catch_up()
        for _ in range(iterations):
            write_iteration(store, total)
            box.iteration(total)
            total += 1
        box.close("KILLED", 0.05)
        path = folder / "metrics.jsonl"
        content = path.read_bytes()
        path.write_bytes(content[: max(0, len(content) - torn_bytes)])
    server.failures = []
    box = Outbox(folder, store, trackers=[Client(server)])
    box.catch_up()
    assert box.close("FINISHED", 10) == []
    assert keys(server) == [f"iterations/{k:06d}" for k in range(total)]


def test_a_tracker_that_breaks_costs_its_records_only_and_says_why(tmp_path, caplog):
    store = MemoryBackend()
    broken, well = Server(failures=[None, ZeroDivisionError("no clock")]), Server()
    box = Outbox(tmp_path, store, trackers=[Client(broken), Client(well)])
    for k in range(2):
        write_iteration(store, k)
        box.iteration(k)
    (left,) = box.close("FINISHED", 10)
    assert "lacks 2 of 2 records: unexpected ZeroDivisionError: no clock" in left
    assert "test server gets nothing more of this run" in caplog.text
    assert len(well.records) == 2
