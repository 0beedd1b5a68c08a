import hashlib
import json
import math

import pytest

from slime_core.errors import DataError, DigestError, StaleOwnerError
from slime_core.store import layout
from slime_core.store.backend import MemoryBackend
from slime_core.store.batch import BatchContent, put_batch, read_batch
from slime_core.store.documents import read_document
from slime_core.store.ledger import (
    initial_state,
    list_ledgers,
    next_state,
    put_ledger,
    put_sync,
    read_ledger,
    unbroken_chain,
)
from tests.unit.store.builders import (
    FakeOwner,
    add_ledger,
    batch_content,
    group_rows,
    run_iteration,
    seal_segment,
    write_groups,
)

START = initial_state("weights")


@pytest.fixture
def backend():
    return MemoryBackend()


@pytest.fixture
def content(backend) -> BatchContent:
    write_groups(backend, 0, [group_rows(1), group_rows(2), group_rows(3, verdict="dropped")])
    return batch_content(0, seal_segment(backend, 0))


def sha256(value) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


def test_states_are_plain_hashes_of_what_they_name():
    assert initial_state("w") == sha256(["initial", "w", 1])
    assert next_state("p", "b", "n") == sha256(["iteration", "p", "b", "n"])
    assert len({next_state(*args) for args in ("pbn", "bpn", "pnb", "qbn")}) == 4


def test_a_batch_comes_back_as_it_was(backend, content):
    owner = FakeOwner()
    batch = put_batch(backend, owner, content, {"seconds": 0.5})
    again = read_batch(backend, 0)
    assert again == batch and owner.guarded == 1 and read_batch(backend, 1) is None
    assert again.content.rewards == content.rewards and again.content.steps == content.steps
    assert again.content.unused == ((3, 0, 0, "dropped"),)
    assert batch.ref().rows == 8 and batch.ref().kind == "batch"
    assert put_batch(backend, FakeOwner(1), content).found


def test_the_digest_of_a_batch_sees_every_change(backend, content):
    put_batch(backend, FakeOwner(), content)
    rows = content.rows
    for change in (
        {"rewards": [0.0] * rows}, {"raw_rewards": [math.nan] * rows},
        {"steps": (tuple(reversed(range(rows))),)}, {"groups": content.groups[::-1]},
        {"denominators": [3.0] * rows}, {"rollout_ids": [0] * rows}, {"unused": ()},
    ):  # fmt: skip
        with pytest.raises(StaleOwnerError):
            put_batch(backend, FakeOwner(), BatchContent(**(vars(content) | change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [1.0]}, "1 rewards for 8 rows"),
        ({"rollout_ids": [1]}, "1 rollout_ids for 8 rows"),
        ({"steps": ((0, 0),)}, "a row twice"),
        ({"steps": ((8,),)}, "one that is not there"),
        ({"seals": {}}, r"unsealed segments \[0\]"),
    ],
)
def test_batches_that_contradict_themselves_are_refused(backend, content, change, message):
    with pytest.raises(DataError, match=message):
        put_batch(backend, FakeOwner(), BatchContent(**(vars(content) | change)))
    assert read_batch(backend, 0) is None


def test_a_batch_cannot_train_a_group_twice(backend, content):
    twice = {"groups": (content.groups[0], content.groups[0])}
    with pytest.raises(DataError, match="trains a group twice"):
        put_batch(backend, FakeOwner(), BatchContent(**(vars(content) | twice)))


def test_a_ledger_entry_comes_back_as_it_was(backend, content):
    batch = put_batch(backend, FakeOwner(), content)
    result = {"steps": [{"loss": math.nan, "skipped": True}, {"loss": 0.1}], "metrics": {"a": 1}}
    entry = put_ledger(
        backend, FakeOwner(4), iteration=0, parent=START, batch_digest=batch.digest,
        numeric_digest="n", weight_version="a-1", result=result, by={"seconds": 1.5},
    )  # fmt: skip
    again = read_ledger(backend, 0)
    assert again.state == next_state(START, batch.digest, "n") and again.digest == entry.digest
    assert math.isnan(again.result["steps"][0]["loss"]) and again.forced_skips == (True, False)
    assert again.by == {"seconds": 1.5, "epoch": 4} and read_ledger(backend, 1) is None


def three_iterations(backend) -> list[str]:
    states, state, seal = [], START, ""
    for k in range(3):
        state, seal = run_iteration(backend, k, state, seal)
        states.append(state)
    return states


def test_an_unbroken_chain(backend):
    assert unbroken_chain(backend, START) == []
    states = three_iterations(backend)
    assert [entry.state for entry in unbroken_chain(backend, START)] == states
    assert list_ledgers(backend) == [0, 1, 2]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (layout.ledger(1), r"000001/ledger\.json is missing, but .*000002/ledger\.json"),
        (layout.ledger(0), r"000000/ledger\.json is missing"),
        (layout.batch(1), r"000001/batch\.json is missing"),
    ],
)
def test_a_gap_is_named(backend, key, message):
    three_iterations(backend)
    backend.delete(key)
    with pytest.raises(DigestError, match=message):
        unbroken_chain(backend, START)


def test_the_last_entry_may_be_missing(backend):
    states = three_iterations(backend)
    backend.delete(layout.ledger(2))
    assert [entry.state for entry in unbroken_chain(backend, START)] == states[:2]


def test_a_foreign_start_a_swapped_batch_and_a_wrong_parent_are_found(backend):
    three_iterations(backend)
    with pytest.raises(DigestError, match=r"000000/ledger\.json does not follow"):
        unbroken_chain(backend, initial_state("other weights"))
    batch = read_batch(backend, 2)
    backend.delete(layout.ledger(2))
    add_ledger(backend, batch, START)
    with pytest.raises(DigestError, match=r"000002/ledger\.json does not follow"):
        unbroken_chain(backend, START)
    backend.delete(layout.batch(1))
    put_batch(backend, FakeOwner(), BatchContent(**(vars(batch.content) | {"iteration": 1})))
    with pytest.raises(DigestError, match=r"000001/ledger\.json was trained on another"):
        unbroken_chain(backend, START)


def test_the_first_record_of_a_sync_stays(backend):
    put_sync(backend, 4, "a-5", {"canary": 1e-7})
    assert put_sync(backend, 4, "a-5", {"canary": 2e-7}).found
    document = read_document(backend, layout.sync(4))
    assert document.body == {"iteration": 4, "version": "a-5"} and document.by["canary"] == 1e-7
