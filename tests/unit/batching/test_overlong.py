import numpy as np
import pytest

from slime_core.batching.overlong import OverlongCounts, apply_overlong_policy
from slime_core.errors import ConfigError, DataError


def overlong_batch(make_batch):
    # Row 1 and 2 are one rollout; row 3's prompt alone fills the limit of 6.
    return make_batch(
        [2, 3, 1, 7], [3, 5, 4, 1], rollout_ids=[0, 1, 1, 2], mask=[1] * 13, steps=((0, 1), (2, 3))
    )


def test_rows_that_fit_are_not_touched(make_batch):
    batch = make_batch([1, 2], [3, 2])
    same, counts = apply_overlong_policy(batch, 4, "drop")
    assert same is batch and counts == OverlongCounts()


def test_error_names_the_first_row_and_the_ways_out(make_batch):
    with pytest.raises(DataError, match=r"2 rows .* row 1 \(group 0\) with 8.*--overlong-policy"):
        apply_overlong_policy(overlong_batch(make_batch), 6, "error")


def test_truncate_cuts_the_end_and_counts_denominators_anew(make_batch):
    batch = overlong_batch(make_batch)
    cut, counts = apply_overlong_policy(batch, 6, "truncate")
    assert counts == OverlongCounts(truncated_rows=1, truncated_tokens=2, dropped_rows=1)
    assert cut.lengths.tolist() == [5, 6, 5, 8]
    assert cut.response_lengths.tolist() == [3, 3, 4, 1]
    assert cut.row_tokens(1).tolist() == batch.row_tokens(1)[:6].tolist()
    kept = batch.rollout_log_probs[batch.row_response(1)][:3]
    assert cut.rollout_log_probs[cut.row_response(1)].tolist() == kept.tolist()
    assert cut.truncated.tolist() == [0, 1, 0, 0]
    assert cut.denominators.tolist() == [3, 7, 7, 0]
    assert cut.steps == ((0, 1), (2,))
    assert cut.row_tokens(2).tolist() == batch.row_tokens(2).tolist()


def test_drop_takes_rows_out_of_their_step(make_batch):
    batch = overlong_batch(make_batch)
    left, counts = apply_overlong_policy(batch, 6, "drop")
    assert counts == OverlongCounts(dropped_rows=2)
    assert left.steps == ((0,), (2,))
    assert left.denominators.tolist() == [3, 4, 4, 0]
    assert np.array_equal(left.tokens, batch.tokens)
    assert not left.loss_mask[left.row_response(1)].any()


def test_an_unknown_policy_is_refused(make_batch):
    with pytest.raises(ConfigError, match="'shrink'"):
        apply_overlong_policy(overlong_batch(make_batch), 6, "shrink")
