import pytest

from slime_core.errors import DigestError
from slime_core.run.frontier import Frontier, GroupLog
from slime_core.store.backend import MemoryBackend
from slime_core.store.batch import BatchContent
from slime_core.store.cache import NodeCache
from slime_core.store.seal import adopt
from tests.unit.store.builders import (
    batch_content,
    draw,
    group_rows,
    seal_segment,
    write_groups,
)


def test_the_frontier_moves_with_the_log():
    start = Frontier()
    assert start.after([]) is start
    moved = start.after([draw(0), draw(1)]).after([draw(2)])
    assert moved == Frontier(2, 3, (0, 2), {"next": 3})
    assert moved.to_dict() == {
        "next_seq": 2, "next_group_id": 3, "last_draw": (0, 2), "source_state": {"next": 3},
    }  # fmt: skip


@pytest.fixture
def store():
    backend = MemoryBackend()
    write_groups(
        backend, 0,
        [group_rows(0), group_rows(1, 0, "aborted"), group_rows(2, 0, "dropped", reason="std")],
    )  # fmt: skip
    seal = seal_segment(backend, 0)
    write_groups(backend, 1, [group_rows(1, 1), group_rows(3, 0, "aborted")])
    return seal, adopt(NodeCache(backend), 1)


def test_what_became_of_every_draw(store):
    seal, unsealed = store
    log = GroupLog.build([draw(g) for g in range(5)], [seal.as_segment()], [unsealed], [])
    assert [(s.group_id, s.next_attempt) for s in log.open_groups()] == [(3, 1), (4, 0)]
    assert [s.group_id for s in log.ready_groups()] == [0]
    assert [log.groups[g].segment for g in range(5)] == [0, 1, 0, -1, -1]
    assert not log.groups[1].ready and log.groups[1].next_attempt == 2
    assert not log.groups[2].ready and not log.groups[2].open


def test_a_batch_takes_its_groups_out_of_waiting(store):
    seal, _ = store
    batch = batch_content(0, seal)
    log = GroupLog.build([draw(g) for g in range(3)], [seal.as_segment()], [], [batch])
    assert log.groups[0].iteration == 0 and log.groups[2].unused == "std"
    assert log.ready_groups() == []


def test_what_the_log_does_not_know_is_a_fault(store):
    seal, _ = store
    batch = batch_content(0, seal)
    draws = [draw(g) for g in range(3)]
    segment = seal.as_segment()
    with pytest.raises(DigestError, match="draw 0 is logged twice"):
        GroupLog.build([draw(0), draw(0)], [], [], [])
    with pytest.raises(DigestError, match="segment 0 holds group 2, which no draw names"):
        GroupLog.build(draws[:2], [segment], [], [])
    twice = BatchContent(**(vars(batch) | {"iteration": 1}))
    with pytest.raises(DigestError, match="group 0 is in the batches 0 and 1"):
        GroupLog.build(draws, [segment], [], [batch, twice])
