import asyncio

import numpy as np
import pytest

from slime_core.errors import DigestError, MissingError, StoreError
from slime_core.rewards.result import Score, ScoreFailure
from slime_core.run.rescore import reordered, rescore
from slime_core.store import layout
from slime_core.store.cache import NodeCache
from slime_core.store.query import query
from slime_core.store.scores import RowScore, put_scores, read_scores
from slime_core.store.seal import read_seal
from slime_core.store.verify import verify_run
from tests.unit.store.runs import START, stored_run


class Flipped:
    """Gives 1 where the row has 0 and the other way round; cannot grade the first of group 2."""

    def grader_digest(self, sample):
        assert sample.custom_rm_path is None and "rm_type" not in sample.metadata
        return "f" * 64

    async def score_group(self, samples):
        return [
            ScoreFailure("timeout", "too slow", "f")
            if (sample.group_index, i) == (2, 0)
            else Score({"whole": 1.0 - sample.reward}, 1.0 - sample.reward, "f")
            for i, sample in enumerate(samples)
        ]


@pytest.fixture
def cache(tmp_path):
    return NodeCache(stored_run(tmp_path / "store", "a", 2), tmp_path / "cache")


def seal_of(cache, segment):
    seal = read_seal(cache.backend, segment)
    assert seal is not None
    return seal


def test_an_overlay_beside_rows_that_do_not_change(cache):
    before = {e.key: cache.backend.get(e.key) for e in cache.backend.list()}
    first = asyncio.run(rescore(cache, Flipped(), 0))
    assert (first.rows, first.changed, first.groups, first.reordered) == (8, 8, 2, 2)
    assert (first.reward, first.reward_now, first.failed) == (0.5, 0.5, 0)
    second = asyncio.run(rescore(cache, Flipped(), 1))
    assert (second.rows, second.failed, second.changed) == (8, 1, 7)
    assert second.reward == pytest.approx(4 / 7) and second.reward_now == pytest.approx(3 / 7)
    after = {e.key: cache.backend.get(e.key) for e in cache.backend.list()}
    assert after.keys() - before.keys() == {layout.scores("f" * 64, k) for k in (0, 1)}
    assert {key: after[key] for key in before} == before
    assert verify_run(cache, START) == []


def test_overlays_are_read_and_queried(cache):
    asyncio.run(rescore(cache, Flipped(), 1))
    rows = read_scores(cache, "f" * 64, seal_of(cache, 1)).to_pylist()
    assert [(row["group_id"], row["row"]) for row in rows] == [
        (g, i) for g in (2, 3) for i in range(4)
    ]
    assert rows[0]["reward"] is None and rows[0]["failure"] == "timeout: too slow"
    assert rows[1]["values"] == '{"whole":0.0}'
    joined = query(
        cache,
        "SELECT count(*) n FROM scores c JOIN samples s ON s.group_index = c.group_id "
        "AND s.sample_position = c.row WHERE c.reward = 1 - s.reward",
    )
    assert joined.to_pylist() == [{"n": 7}]


def test_an_overlay_belongs_to_one_seal(cache):
    put_scores(cache.backend, "s", seal_of(cache, 0), [RowScore(0, 0, 0, 1.0)])
    with pytest.raises(MissingError):
        read_scores(cache, "s", seal_of(cache, 1))
    data = cache.backend.get(layout.scores("s", 0))
    cache.backend.put_new(layout.scores("s", 1), data)
    with pytest.raises(DigestError, match="made for another seal of segment 1"):
        read_scores(cache, "s", seal_of(cache, 1))
    with pytest.raises(StoreError, match="segment 7 is not sealed"):
        asyncio.run(rescore(cache, Flipped(), 7))


@pytest.mark.parametrize(
    ("before", "now", "wanted"),
    [
        ([0, 1, 2], [5, 6, 9], False),
        ([0, 1, 2], [0, 2, 1], True),
        ([0, 0, 1], [0, 1, 2], True),
        ([0, 1, 2], [np.nan, 3, 4], False),
        ([], [], False),
    ],
)
def test_order(before, now, wanted):
    assert reordered(np.asarray(before, float), np.asarray(now, float)) is wanted
