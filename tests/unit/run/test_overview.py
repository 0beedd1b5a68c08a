import os
import time
from dataclasses import asdict

import pytest

from slime_core.errors import ConfigError, DigestError, UnavailableError
from slime_core.run.epoch import Lease
from slime_core.run.overview import find_run, overview
from slime_core.run.process import ProcessIdentity, own_identity
from slime_core.store import layout
from slime_core.store.backend import open_backend
from slime_core.store.documents import put_document
from tests.unit.store.runs import stored_run


@pytest.fixture
def store(tmp_path):
    for i, run_id in enumerate(("sort-b", "sort-a", "math")):
        stored_run(tmp_path, run_id, i, created=f"2026-01-0{i + 1}")
    return tmp_path


def look(store):
    return {run.run_id: run for run in overview(open_backend(str(store)), str(store))}


def test_runs_in_the_order_of_their_beginning(store):
    runs = look(store)
    assert list(runs) == ["sort-b", "sort-a", "math"]
    assert [run.iterations for run in runs.values()] == [0, 1, 2]
    assert [run.reward for run in runs.values()] == [None, 1.0, 1.0]
    assert runs["math"].where == f"{store}/math" and 0 <= runs["math"].age_s < 60
    assert [run.state for run in runs.values()] == ["not started", "new", "new"]


def test_a_run_whose_starts_failed_is_not_called_stopped(store):
    lease = Lease.acquire(open_backend(str(store / "sort-b")))
    assert look(store)["sort-b"].state == "running"
    lease.release()
    assert look(store)["sort-b"].state == "not started"


def test_states(store, monkeypatch):
    lease = Lease.acquire(open_backend(str(store / "math")))
    assert look(store)["math"].state == "running"
    with monkeypatch.context() as patch:
        patch.setattr(ProcessIdentity, "is_gone", lambda self: True)
        assert look(store)["math"].state == "killed"
    lease.release()
    assert look(store)["math"].state == "stopped"
    with monkeypatch.context() as patch:
        patch.setattr("slime_core.run.overview.planned_iterations", lambda *_: 2)
        assert look(store)["math"].state == "finished"
    for epoch, boot, state in ((0, own_identity().boot_id, "running"), (1, "other", "killed")):
        who = {**asdict(own_identity()), "boot_id": boot}
        silent = {**who, "ttl_s": 0.0, "config": "", "token": "a"}
        put_document(open_backend(str(store / "sort-a")), layout.epoch(epoch), silent)
        os.utime(store / "sort-a" / layout.epoch(epoch), (time.time() - 60,) * 2)
        assert look(store)["sort-a"].state == state
    (store / "math" / layout.batch(1)).write_text("{}")
    damaged = look(store)["math"]
    assert damaged.state == "damaged" and layout.batch(1) in damaged.note


def test_a_store_that_goes_away_meanwhile_has_no_damaged_runs(store, monkeypatch):
    def fails(*_):
        raise error

    monkeypatch.setattr("slime_core.run.overview.iterations_done", fails)
    error = DigestError("a ledger is damaged")
    assert look(store)["math"].state == "damaged"
    error = UnavailableError("SlowDown")
    with pytest.raises(UnavailableError, match="SlowDown"):
        look(store)


def test_a_run_is_found_by_a_beginning_that_fits_one(store):
    root = open_backend(str(store))
    assert find_run(root, "m") == "math" and find_run(root, "sort-a") == "sort-a"
    assert find_run(root, "last") == "math"
    with pytest.raises(ConfigError, match="may be sort-b, sort-a; type more"):
        find_run(root, "sort")
    with pytest.raises(ConfigError, match="did you mean math"):
        find_run(root, "meth")
    with pytest.raises(ConfigError, match="it has no runs"):
        find_run(open_backend(str(store / "empty")), "last")
