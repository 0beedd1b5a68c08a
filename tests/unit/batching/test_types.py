from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.batching.types import segment_sums
from slime_core.errors import DataError


def test_lengths_and_rows_follow_from_the_offsets(make_batch):
    batch = make_batch([2, 3, 1], [4, 0, 2], mask=[1, 0, 1, 1, 0, 0])
    assert batch.lengths.tolist() == [6, 3, 3]
    assert batch.prompt_lengths.tolist() == [2, 3, 1]
    assert batch.mask_sums.tolist() == [3, 0, 0]
    assert batch.response_rows.tolist() == [0, 0, 0, 0, 2, 2]
    assert batch.row_tokens(1).tolist() == batch.tokens[6:9].tolist()
    assert batch.loss_mask[batch.row_response(2)].tolist() == [0, 0]


@given(
    order=st.permutations(range(5)),
    kept=st.integers(0, 5),
    responses=st.lists(st.integers(0, 6), min_size=5, max_size=5),
)
def test_select_copies_whole_rows_in_the_given_order(make_batch_module, order, kept, responses):
    batch = make_batch_module([3, 1, 2, 5, 1], responses, steps=((0, 1, 2), (3, 4)))
    rows = order[:kept]
    chosen = batch.select(rows)
    assert chosen.num_rows == kept
    for new, old in enumerate(rows):
        assert chosen.row_tokens(new).tolist() == batch.row_tokens(old).tolist()
        for name in ("loss_mask", "rollout_log_probs"):
            ours = getattr(chosen, name)[chosen.row_response(new)]
            assert ours.tolist() == getattr(batch, name)[batch.row_response(old)].tolist()
        assert chosen.denominators[new] == batch.denominators[old]
    trained = [{rows[new] for new in step} for step in chosen.steps]
    expected = [set(step) & set(rows) for step in batch.steps]
    assert trained == [step for step in expected if step]


def test_metadata_follows_its_row(make_batch):
    batch = replace(make_batch([1, 1, 1], [2, 3, 1]), metadata=({"a": 1}, None, {"b": 2}))
    assert batch.select([2, 0]).metadata == ({"b": 2}, {"a": 1})


def test_denominators_of_a_selection_stay_those_of_the_whole_rollout(make_batch):
    batch = make_batch([1, 1], [2, 3], rollout_ids=[7, 7], mask=[1, 1, 1, 0, 1])
    assert batch.select([0]).denominators.tolist() == [4.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros(9, dtype=np.int64)}, "tokens must be a flat int32"),
        ({"rewards": np.array([1.0, np.nan])}, "row 1 .*not finite"),
        ({"metadata": ({},)}, "metadata has 1 values, expected 2"),
        ({"rewards": np.array([1.0])}, "rewards has 1 values, expected 2"),
        ({"denominators": np.zeros(2)}, "row 0 .*denominator"),
        ({"response_lengths": np.array([4, 2])}, "contradicts response_offsets"),
        ({"steps": ((0,), (0, 1))}, "a row twice"),
        ({"steps": ((0, 2),)}, "outside 0..1"),
        ({"steps": ((0, 1), ())}, "empty optimizer step"),
        ({"loss_mask": np.full(6, 2, dtype=np.uint8)}, "0 and 1 only"),
        ({"token_offsets": np.array([0, 5, 8])}, "from 0 to 9"),
        ({"token_offsets": np.array([0, 3, 9])}, "row 0 .*at least one prompt token"),
    ],
)
def test_contradictions_are_named(make_batch, change, message):
    batch = make_batch([2, 1], [3, 3], mask=[1] * 6)
    with pytest.raises(DataError, match=message):
        replace(batch, **change)


def test_select_refuses_a_row_twice_or_out_of_range(make_batch):
    batch = make_batch([2, 1], [3, 3])
    with pytest.raises(DataError, match="twice"):
        batch.select([0, 0])
    with pytest.raises(DataError, match=r"within 0\.\.1"):
        batch.select([2])


def test_segment_sums_of_empty_rows_are_zero():
    assert segment_sums(np.array([1.5, 2.0]), np.array([0, 0, 2, 2])).tolist() == [0.0, 3.5, 0.0]
