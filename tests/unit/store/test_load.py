import numpy as np
import pytest

from slime_core.errors import DigestError
from slime_core.sample import Status
from slime_core.store import layout
from slime_core.store.backend import MemoryBackend, open_backend
from slime_core.store.batch import BatchContent, put_batch
from slime_core.store.cache import NodeCache
from slime_core.store.load import load_train_batch
from tests.unit.store.builders import (
    SAMPLES,
    FakeOwner,
    batch_content,
    group_rows,
    seal_segment,
    write_groups,
)


@pytest.fixture(params=["file", "memory"])
def backend(request, tmp_path):
    return MemoryBackend() if request.param == "memory" else open_backend(str(tmp_path / "store"))


def stored(backend, groups, order=slice(None)):
    """A batch of these groups, each in a part of its own."""
    for seq, group in enumerate(groups):
        write_groups(backend, 0, [group], seq=seq)
    content = batch_content(0, seal_segment(backend, 0))
    change = {"groups": content.groups[order]}
    return put_batch(backend, FakeOwner(), BatchContent(**(vars(content) | change)))


def test_columns_are_those_of_the_samples_in_batch_order(backend, tmp_path):
    groups = [group_rows(g) for g in (5, 2, 9)]
    batch = stored(backend, groups, order=slice(None, None, -1))
    loaded = load_train_batch(backend, batch, NodeCache(backend, tmp_path / "cache"))
    samples = [s for group in (groups[2], groups[0], groups[1]) for s in group.samples]
    assert loaded.group_ids.tolist() == [9] * SAMPLES + [5] * SAMPLES + [2] * SAMPLES
    for i, sample in enumerate(samples):
        assert loaded.row_tokens(i).tolist() == sample.tokens
        response = loaded.row_response(i)
        assert loaded.loss_mask[response].tolist() == sample.loss_mask
        assert loaded.rollout_log_probs[response].tolist() == sample.rollout_log_probs
    assert loaded.response_lengths.tolist() == [s.response_length for s in samples]
    content = batch.content
    assert loaded.rewards.tolist() == content.rewards and loaded.steps == content.steps
    assert loaded.raw_rewards.tolist() == content.raw_rewards
    assert loaded.rollout_ids.tolist() == content.rollout_ids
    assert loaded.denominators.tolist() == content.denominators
    assert loaded.truncated.tolist() == [0] * len(samples)


@pytest.mark.parametrize("experts", [4, 300])
def test_routes_of_the_engine_are_views_of_the_stored_ones(backend, tmp_path, experts):
    groups, rng = [group_rows(g) for g in (1, 2)], np.random.default_rng(0)
    want = []
    for at, sample in enumerate(s for group in groups for s in group.samples):
        routes = rng.integers(0, experts, (len(sample.tokens) - 1, 3, 2)).astype(np.int32)
        sample.rollout_routed_experts = None if at == 1 else routes
        want.append(sample.rollout_routed_experts)
    loaded = load_train_batch(backend, stored(backend, groups), NodeCache(backend, tmp_path / "c"))
    assert len(loaded.routes) == loaded.num_rows
    for found, own in zip(loaded.routes, want, strict=True):
        assert (found is None) == (own is None)
        if found is not None:
            assert (found == own).all() and not found.flags.owndata
            assert found.dtype == (np.uint8 if experts == 4 else np.uint16)
    fresh = MemoryBackend()
    assert load_train_batch(fresh, stored(fresh, [group_rows(3)])).routes == ()


def test_removed_maskless_and_truncated_rows(backend):
    group = group_rows(0)
    removed, bare, cut, _ = group.samples
    removed.remove_sample = True
    bare.loss_mask = bare.rollout_log_probs = None
    bare.spans = []
    cut.status = Status.TRUNCATED
    loaded = load_train_batch(backend, stored(backend, [group]))
    assert not loaded.loss_mask[loaded.row_response(0)].any()
    assert loaded.loss_mask[loaded.row_response(1)].tolist() == [1] * bare.response_length
    assert np.isnan(loaded.rollout_log_probs[loaded.row_response(1)]).all()
    np.testing.assert_array_equal(
        loaded.rollout_log_probs[loaded.row_response(2)], np.float32(cut.rollout_log_probs)
    )
    assert loaded.truncated.tolist() == [0, 0, 1, 0]


def test_train_metadata_arrives_with_its_row(backend):
    plain, tagged = group_rows(0), group_rows(1)
    tagged.samples[2].train_metadata = {"weight": 0.5, "ids": np.arange(3)}
    other = MemoryBackend()
    assert load_train_batch(other, stored(other, [plain])).metadata == ()
    found = load_train_batch(backend, stored(backend, [plain, tagged])).metadata
    assert [i for i, row in enumerate(found) if row is not None] == [SAMPLES + 2]
    assert found[SAMPLES + 2]["weight"] == 0.5
    assert found[SAMPLES + 2]["ids"].tolist() == [0, 1, 2]


def test_the_right_attempt_is_trained(backend):
    old, new = group_rows(1, attempt=0, verdict="aborted"), group_rows(1, attempt=1)
    new.samples[0].tokens[-1] = 77
    loaded = load_train_batch(backend, stored(backend, [old, new]))
    assert loaded.num_rows == SAMPLES and loaded.row_tokens(0)[-1] == 77


def test_a_batch_whose_rows_are_not_what_it_names_is_refused(backend):
    batch = stored(backend, [group_rows(1), group_rows(2)])
    content = batch.content
    other = BatchContent(**(vars(content) | {"seals": {0: "0" * 64}}))
    with pytest.raises(DigestError, match="names a seal of segment 0 that is not there"):
        load_train_batch(backend, type(batch)(other, "d"))
    wrong = type(content.groups[0])(1, 0, 0, SAMPLES, "0" * 64)
    other = BatchContent(**(vars(content) | {"groups": (wrong, content.groups[1])}))
    with pytest.raises(DigestError, match="rows of group 1 that segment 0 does not hold"):
        load_train_batch(backend, type(batch)(other, "d"))
    part = next(e.key for e in backend.list(layout.GROUPS) if layout.parse_part(e.key))
    backend.delete(part)
    with pytest.raises(DigestError, match="is gone"):
        load_train_batch(backend, batch)
