"""Experts and media can be given up: what is left is verified, and who needs them is told."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from slime_core.errors import ConfigError, DataError, DigestError
from slime_core.rewards.result import Score
from slime_core.run.rescore import rescore
from slime_core.store import layout
from slime_core.store.backend import open_backend
from slime_core.store.batch import put_batch
from slime_core.store.cache import NodeCache
from slime_core.store.compaction import compact_segment
from slime_core.store.load import load_groups, load_train_batch
from slime_core.store.parts import GroupRows
from slime_core.store.planes import checked
from slime_core.store.tables import row_batches
from slime_core.store.verify import verify_run
from tests.unit.store.builders import (
    FakeOwner,
    batch_content,
    finished_sample,
    group_rows,
    seal_segment,
    write_groups,
)

EXPERTS = {"rollout_routed_experts"}
MEDIA = {"multimodal_inputs", "multimodal_train_input_id"}


def rich_group(group: int) -> GroupRows:
    """Rows with routed experts and media."""
    samples = [finished_sample(group, i) for i in range(2)]
    for i, sample in enumerate(samples):
        sample.rollout_routed_experts = np.full((50, 8, 4), i, dtype=np.uint8)
        sample.multimodal_inputs = {"images": [f"image {group}.{i}"]}
        sample.multimodal_train_input_id = f"sha {group}.{i}"
    return GroupRows(group, 0, 0, group, samples, grader_digest="g")


@pytest.fixture
def stored(tmp_path):
    """(the store, its batch): a segment of one rich group and a plain one."""
    backend = open_backend(str(tmp_path / "store"))
    write_groups(backend, 0, [rich_group(0), group_rows(1)])
    batch = put_batch(backend, FakeOwner(), batch_content(0, seal_segment(backend, 0)))
    return NodeCache(backend, tmp_path / "cache"), batch


def groups_of(cache, batch):
    return load_groups(cache, batch.content)


def same_but(before, after, names) -> bool:
    """Whether samples are equal outside of the fields `names`, and have none of these."""
    for one, other in zip(before, after, strict=True):
        rest = [
            {k: v for k, v in s.__dict__.items() if k not in EXPERTS | names} for s in (one, other)
        ]
        if rest[0] != rest[1] or any(getattr(other, name) is not None for name in names):
            return False
    return True


def test_one_plane_goes_and_the_rest_stays_as_it_was(stored):
    cache, batch = stored
    rich, plain = (rows.to_samples() for rows in groups_of(cache, batch))
    trained = load_train_batch(cache.backend, batch, cache)
    done = compact_segment(cache, 0, ("experts",))
    assert done is not None and done.bytes_after < done.bytes_before
    thin, other = groups_of(cache, batch)
    assert thin.lost == {"experts"} and other.lost == frozenset()
    assert same_but(rich, thin.to_samples(spared=("experts",)), EXPERTS)
    assert thin.to_samples(spared=("experts",))[0].multimodal_inputs == {"images": ["image 0.0"]}
    assert other.to_samples() == plain
    again = load_train_batch(cache.backend, batch, cache)
    assert np.array_equal(again.tokens, trained.tokens)
    assert np.array_equal(again.rollout_log_probs, trained.rollout_log_probs, equal_nan=True)
    assert verify_run(cache, rows=True) == []


def test_what_needs_whole_samples_is_refused_with_a_sentence(stored):
    cache, batch = stored
    compact_segment(cache, 0, ("experts", "media"))
    thin, other = groups_of(cache, batch)
    with pytest.raises(DataError, match="had experts and media, which were given up"):
        thin.to_samples()
    with pytest.raises(DataError, match="had media, which"):
        thin.to_samples(spared=("experts",))
    assert len(other.to_samples()) == len(other)
    tables = list(row_batches(cache, [0]))
    assert tables[0].column("rollout_routed_experts").null_count == 2, "tables show that it is gone"


class Ones:
    """A grader that gives 1."""

    def grader_digest(self, sample):
        return "g" * 64

    async def score_group(self, samples):
        return [Score(1.0, 1.0, "g") for _ in samples]


def test_graders_need_media_and_no_experts(stored):
    cache, _ = stored
    compact_segment(cache, 0, ("experts",))
    assert asyncio.run(rescore(cache, Ones(), 0)).reward_now == 1.0
    compact_segment(cache, 0, ("media",))
    with pytest.raises(DataError, match="had media, which were given up"):
        asyncio.run(rescore(cache, Ones(), 0))


def test_planes_go_one_after_the_other_and_only_once(stored):
    cache, batch = stored
    compact_segment(cache, 0)
    for plane, lost in (("media", {"media"}), ("experts", {"experts", "media"})):
        done = compact_segment(cache, 0, (plane,))
        assert done is not None and done.parts == 0
        assert groups_of(cache, batch)[0].lost == lost
        files = [e.key for e in cache.backend.list(layout.segment(0))]
        assert [bool(layout.parse_compact(key)) for key in files] == [True, False]
        assert verify_run(cache, rows=True) == []
        assert compact_segment(cache, 0, (plane,)) is None and compact_segment(cache, 0) is None


def test_rows_without_the_plane_are_left_alone(tmp_path):
    cache = NodeCache(open_backend(str(tmp_path)))
    write_groups(cache.backend, 0, [group_rows(0)])
    seal_segment(cache.backend, 0)
    for _ in range(2):
        before = cache.backend.list(layout.segment(0))
        assert compact_segment(cache, 0, ("experts", "media")) is None
        assert cache.backend.list(layout.segment(0)) == before
        compact_segment(cache, 0)


def test_one_that_was_cut_off_leaves_the_rows_readable_and_is_finished(stored, monkeypatch):
    cache, batch = stored
    compact_segment(cache, 0)
    with monkeypatch.context() as patch:
        patch.setattr(cache.backend, "delete", lambda key: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compact_segment(cache, 0, ("experts",))
    assert len(cache.backend.list(layout.segment(0))) == 3, "both files and the seal"
    assert verify_run(cache, rows=True) == []
    compact_segment(cache, 0, ("experts", "media"))
    assert {"experts", "media"} >= groups_of(cache, batch)[0].lost >= {"media"}
    assert verify_run(cache, rows=True) == []


def test_rows_that_are_not_those_that_were_sealed_lose_nothing(stored, monkeypatch):
    cache, _ = stored
    before = cache.backend.list()
    plain = "slime_core.store.compaction.rows_digest"
    monkeypatch.setattr(plain, lambda rows: "another")
    with pytest.raises(DigestError, match="other rows in group 0"):
        compact_segment(cache, 0, ("experts",))
    assert cache.backend.list() == before


def test_only_planes_that_no_resume_reads_can_be_named():
    assert checked(["media", "experts"]) == {"media", "experts"}
    with pytest.raises(ConfigError, match="'logprobs' cannot be given up: name experts or media"):
        checked(["logprobs"])
