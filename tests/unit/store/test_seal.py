import pytest

from slime_core.errors import DigestError, StaleOwnerError
from slime_core.store import layout
from slime_core.store.backend import open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.documents import read_document
from slime_core.store.seal import adopt, list_seals, open_groups, put_seal, read_seal
from tests.unit.store.builders import FakeOwner, group_rows, seal_segment, write_groups


@pytest.fixture
def backend(tmp_path):
    return open_backend(str(tmp_path))


@pytest.fixture
def cache(backend):
    return NodeCache(backend)


def test_an_empty_segment_has_nothing(cache):
    segment = adopt(cache, 0)
    assert segment.groups == () and segment.finished == {} and read_seal(cache.backend, 0) is None


def test_groups_are_adopted_in_the_order_of_ids_whoever_finished_first(backend, cache):
    write_groups(backend, 0, [group_rows(4), group_rows(1)])
    write_groups(backend, 0, [group_rows(2, verdict="dropped", reason="zero_std")], seq=1)
    segment = adopt(cache, 0)
    assert [g.entry.group_id for g in segment.groups] == [1, 2, 4]
    assert [g.entry.group_id for g in segment.kept] == [1, 4]
    assert list(segment.finished) == [1, 2, 4] and segment.next_attempts == {}


def test_of_a_double_the_lowest_epoch_and_number_counts(backend, cache):
    parts = {}
    for epoch, seq in ((1, 0), (0, 7), (0, 2), (2, 0)):
        group = group_rows(1)
        group.samples[0].response = f"written by {epoch}, {seq}"
        parts[epoch, seq] = write_groups(backend, 0, [group], epoch, seq)
    segment = adopt(cache, 0)
    assert [g.at.key for g in segment.groups] == [parts[0, 2].key] and segment.doubles == 3


def test_partial_rows_do_not_finish_a_group(backend, cache):
    write_groups(backend, 0, [group_rows(1, 0, "aborted"), group_rows(2, 0, "failed")])
    write_groups(backend, 0, [group_rows(1, 1, "aborted")], seq=1)
    write_groups(backend, 0, [group_rows(2, 1)], seq=2)
    segment = adopt(cache, 0)
    assert list(segment.finished) == [2] and segment.finished[2].entry.attempt == 1
    assert segment.next_attempts == {1: 2}


def test_complete_rows_win_over_partial_ones_of_the_same_attempt(backend, cache):
    write_groups(backend, 0, [group_rows(1, 0, "aborted")])
    write_groups(backend, 0, [group_rows(1, 0)], epoch=1)
    assert adopt(cache, 0).finished[1].entry.verdict == "kept"


def test_damaged_parts_are_generated_again(backend, cache):
    write_groups(backend, 0, [group_rows(1)])
    bad = write_groups(backend, 0, [group_rows(2)], seq=1)
    data = backend.get(bad.key)
    backend.delete(bad.key)
    backend.put_new(bad.key, data[:-9])
    segment = adopt(cache, 0)
    assert list(segment.finished) == [1]
    assert [item.key for item in segment.quarantined] == [bad.key]


def test_a_seal_says_what_the_segment_holds(backend, cache):
    write_groups(backend, 3, [group_rows(6), group_rows(7)])
    write_groups(backend, 3, [group_rows(8, 0, "dropped", reason="zero_std")], epoch=1)
    write_groups(backend, 3, [group_rows(9, 0, "aborted")], epoch=1, seq=1)
    owner = FakeOwner(1)
    segment = adopt(cache, 3)
    seal = put_seal(backend, owner, segment, parent="p", draws=(6, 10), tokenizer_digest="t")
    assert owner.guarded == 1 and list_seals(backend) == [3]
    assert (seal.rows, seal.rollouts, seal.draws, seal.parent) == (16, 16, (6, 10), "p")
    assert seal.counts == {"kept": 2, "dropped:zero_std": 1, "aborted": 1}
    assert seal.groups == segment.groups
    again = read_seal(backend, 3)
    assert again == seal and again.as_segment().finished == segment.finished
    ref = seal.ref()
    assert (ref.kind, ref.iteration, ref.rows, ref.digest) == ("seal", 3, 16, seal.digest)
    by = read_document(backend, layout.seal(3)).by
    assert by["epoch"] == 1 and len(by["parts"]) == 3
    for group, (part, _, start, length) in zip(seal.groups, by["index"], strict=True):
        assert by["parts"][part][0] == group.at.key
        assert (group.at.start, group.at.length) == (start, length)


def test_two_owners_that_find_the_same_seal_the_same(backend):
    write_groups(backend, 0, [group_rows(1)], epoch=0)
    first = seal_segment(backend, 0, epoch=0)
    second = seal_segment(backend, 0, epoch=1)
    assert second.found and not first.found and second.digest == first.digest
    write_groups(backend, 0, [group_rows(2)], epoch=1)
    with pytest.raises(StaleOwnerError, match=r"groups/000000/seal\.json"):
        seal_segment(backend, 0, epoch=1)


def test_the_seal_does_not_depend_on_parts(tmp_path):
    stores = [open_backend(str(tmp_path / name)) for name in ("together", "alone")]
    write_groups(stores[0], 0, [group_rows(1), group_rows(2)], epoch=3)
    for group in (2, 1):
        write_groups(stores[1], 0, [group_rows(group)], seq=3 - group)
    assert len({seal_segment(store, 0).digest for store in stores}) == 1


def test_what_comes_after_the_seal_is_not_read(backend, cache):
    write_groups(backend, 0, [group_rows(1)])
    seal = seal_segment(backend, 0)
    write_groups(backend, 0, [group_rows(1)], epoch=0, seq=1)
    files = open_groups(cache, read_seal(backend, 0).groups)
    assert list(files) == [(1, 0)] and files[1, 0][0].part.key == seal.groups[0].at.key


def test_a_sealed_part_that_is_gone_or_damaged_is_named(backend, cache):
    part = write_groups(backend, 0, [group_rows(1)])
    seal = seal_segment(backend, 0)
    data = backend.get(part.key)
    backend.delete(part.key)
    with pytest.raises(DigestError, match=f"{part.key} is gone"):
        open_groups(cache, seal.groups)
    backend.put_new(part.key, data + b"x")
    with pytest.raises(DigestError, match=f"{part.key} is damaged"):
        open_groups(cache, seal.groups)
