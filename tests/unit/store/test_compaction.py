"""Compacted segments hold the same rows in less space."""

import pytest

from slime_core.errors import DigestError
from slime_core.store import layout
from slime_core.store.backend import MemoryBackend, open_backend
from slime_core.store.batch import read_batch
from slime_core.store.cache import NodeCache
from slime_core.store.compaction import compact_segment
from slime_core.store.load import load_groups, load_train_batch
from slime_core.store.query import query
from slime_core.store.verify import verify_run
from tests.unit.store.builders import (
    GroupRows,
    finished_sample,
    group_rows,
    seal_segment,
    write_groups,
)
from tests.unit.store.runs import START, stored_run


@pytest.fixture
def cache(tmp_path):
    return NodeCache(stored_run(tmp_path / "store", "a", 2), tmp_path / "cache")


def parts(cache) -> list[str]:
    return [e.key for e in cache.backend.list("groups/") if layout.parse_part(e.key)]


def test_the_same_rows_from_one_file(cache):
    batch = read_batch(cache.backend, 1)
    assert batch is not None
    before = [rows.to_samples() for rows in load_groups(cache, batch.content)]
    done = compact_segment(cache, 1)
    assert done is not None and done.parts == 2
    names = [e.key for e in cache.backend.list(layout.segment(1))]
    assert len(names) == 2 and layout.parse_compact(names[0]) and names[1] == layout.seal(1)
    assert [rows.to_samples() for rows in load_groups(cache, batch.content)] == before
    assert load_train_batch(cache.backend, batch).tokens.size > 0
    assert verify_run(cache, START, rows=True) == []
    assert query(cache, "SELECT count(*) n FROM samples").to_pylist() == [{"n": 16}]
    assert compact_segment(cache, 1) is None


def test_long_rows_become_smaller(tmp_path):
    backend = open_backend(str(tmp_path))
    samples = [finished_sample(0, i, length=2000) for i in range(4)]
    write_groups(backend, 0, [GroupRows(0, 0, 0, 0, samples, grader_digest="g")])
    seal_segment(backend, 0)
    done = compact_segment(NodeCache(backend), 0)
    assert done is not None and done.bytes_after < 0.75 * done.bytes_before


def test_a_part_that_is_damaged_stops_it_and_nothing_is_removed(cache):
    before = parts(cache)
    key = before[0]
    data = cache.backend.get(key)
    cache.backend.delete(key)
    cache.backend.put_new(key, data[:-1])
    with pytest.raises(DigestError, match=r"groups/000000.* is damaged"):
        compact_segment(cache, 0)
    assert parts(cache) == before and not [
        e for e in cache.backend.list("groups/") if layout.parse_compact(e.key)
    ]


def test_a_file_that_was_not_written_well_is_not_trusted(cache, monkeypatch):
    before = parts(cache)
    plain = cache.backend.get
    monkeypatch.setattr(
        cache.backend, "get", lambda key: plain(key)[:-3] if "compact-" in key else plain(key)
    )
    with pytest.raises(DigestError, match=r"compact-.* is damaged"):
        compact_segment(cache, 0)
    assert parts(cache) == before


def test_one_that_was_cut_off_is_finished(cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cache.backend, "delete", lambda key: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compact_segment(cache, 0)
    assert verify_run(cache, START) == []
    done = compact_segment(cache, 0)
    assert done is not None and done.parts == 2
    assert verify_run(cache, START) == []


def test_an_open_segment_is_left_alone():
    backend = MemoryBackend()
    write_groups(backend, 0, [group_rows(0)])
    assert compact_segment(NodeCache(backend), 0) is None
