"""Forks: whole histories up to an iteration, independent of their parent."""

import shutil

import pytest

from slime_core.errors import ConfigError
from slime_core.refs import digest_of
from slime_core.run.audit import audit
from slime_core.run.epoch import Lease, newest_epoch
from slime_core.run.fork import fork_run
from slime_core.run.history import read_history
from slime_core.run.plan import Action, plan
from slime_core.store import layout
from slime_core.store.backend import MemoryBackend, open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.checkpoints import (
    checkpoint_directory,
    fetch_checkpoint,
    list_checkpoints,
    put_checkpoint,
)
from slime_core.store.documents import put_document, read_document
from slime_core.store.ledger import read_ledger
from slime_core.store.verify import verify_run
from tests.unit.store.builders import FakeOwner, run_iteration
from tests.unit.store.runs import START, stored_run


@pytest.fixture(params=["linked", "copied"])
def place(request, tmp_path):
    """(root, parent's cache, the store of the fork): on one file system, or on two stores."""
    parent = stored_run(tmp_path / "store", "base", 4)
    root = open_backend(str(tmp_path / "store"))
    Lease.acquire(parent).release()
    cache = NodeCache(parent, tmp_path / "cache")
    for k in (1, 3):
        ledger = read_ledger(parent, k)
        assert ledger is not None
        folder = checkpoint_directory(cache, k, 0)
        folder.mkdir(parents=True)
        (folder / "rank").write_bytes(b"weights" * k)
        (folder / "empty").touch()
        put_checkpoint(
            cache, FakeOwner(), iteration=k, state=ledger.state, weight_version="a", about={}
        )
    for version in ("a-1", "a-3", "a-4"):
        put_document(parent, layout.evaluation(version, "greedy"), {"version": version})
    target = MemoryBackend() if request.param == "copied" else open_backend(f"{root.url}/twig")
    return root, cache, target


def test_a_fork_is_sound_and_goes_on_after_its_iteration(place, tmp_path):
    root, cache, target = place
    fork = fork_run(root, cache, target, run_id="twig", at=2)
    assert (fork.iterations, fork.checkpoint) == (3, 1)
    assert fork.copied == 0 if not isinstance(target, MemoryBackend) else fork.shared == 0
    history = read_history(NodeCache(target), START)
    now = plan(history, 5)
    assert (now.last, now.iteration, now.action) == (2, 3, Action.OPEN)
    assert [c.iteration for c in now.checkpoints] == [1]
    folder = fetch_checkpoint(NodeCache(target, tmp_path / "far"), now.checkpoints[0])
    assert (folder / "rank").read_bytes() == b"weights"
    assert now.frontier.next_group_id == 6
    versions = {entry.key.split("/")[1] for entry in target.list(layout.EVALS)}
    assert versions == {"a-1", "a-3"}
    assert verify_run(NodeCache(target), START) == []


def test_a_fork_outlives_its_parent_and_each_goes_its_way(place, tmp_path):
    root, cache, target = place
    fork_run(root, cache, target, run_id="twig", at=3)
    ledger, seal = read_ledger(target, 3), read_document(target, layout.seal(3))
    assert ledger is not None
    before = {entry.key for entry in cache.backend.list()}
    run_iteration(target, 4, ledger.state, seal.digest)
    assert {entry.key for entry in cache.backend.list()} == before
    shutil.rmtree(tmp_path / "store" / "base")
    assert verify_run(NodeCache(target), START) == []
    if not isinstance(target, MemoryBackend):
        found = audit(tmp_path / "store" / "twig")
        assert found.sound and found.iterations == 5


def test_it_is_known_by_its_parent_and_its_changes(place):
    root, cache, target = place
    fork_run(root, cache, target, run_id="twig", at=0, changes={"seed": 7})
    body = read_document(root, "runs/twig.json").body
    assert body["fork"] == {"run_id": "base", "at": 0} and body["identity"] == {"seed": 7}
    assert body["identity_digest"] == digest_of({"seed": 7})
    assert read_document(target, layout.RUN).body == body
    newest = newest_epoch(target)
    assert newest is not None and newest.ended
    with Lease.acquire(target) as lease:
        assert lease.epoch == newest.epoch + 1, "no epoch names two owners"


def test_a_fork_that_was_cut_off_is_made_again(place, monkeypatch):
    root, cache, target = place
    with monkeypatch.context() as patch:
        patch.setattr("slime_core.run.fork._close_epochs", lambda target: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fork_run(root, cache, target, run_id="twig", at=2)
    assert [entry.key for entry in root.list("runs/")] == ["runs/base.json"]
    fork_run(root, cache, target, run_id="twig", at=2)
    assert verify_run(NodeCache(target), START) == []


def test_what_cannot_be_forked_says_why(place):
    root, cache, target = place
    for at in (-1, 4):
        with pytest.raises(ConfigError, match="has the iterations 0:4; it cannot be forked at"):
            fork_run(root, cache, target, run_id="twig", at=at)
    with pytest.raises(ConfigError, match="base exists already"):
        fork_run(root, cache, target, run_id="base", at=1)
    with pytest.raises(ConfigError, match="hf_checkpoint cannot change in a fork"):
        fork_run(root, cache, target, run_id="t", at=1, changes={"hf_checkpoint": "x"})
    with pytest.raises(ConfigError, match="lr is no identity field"):
        fork_run(root, cache, target, run_id="t", at=1, changes={"lr": 1})
    assert list_checkpoints(target) == []
