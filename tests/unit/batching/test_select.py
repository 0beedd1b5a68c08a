import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.batching.select import (
    GroupVerdict,
    check_batch_identity,
    choose_groups,
    optimizer_steps,
    rollout_denominators,
    step_totals,
)
from slime_core.errors import ConfigError, DataError


@given(order=st.permutations(range(6)))
def test_groups_are_chosen_by_id_whatever_finishes_first(order):
    dropped = {2: "zero_std"}
    finished = [GroupVerdict(i, i not in dropped, dropped.get(i, "")) for i in order]
    selection = choose_groups(finished, 3)
    assert selection.chosen == (0, 1, 3)
    assert selection.unused == {2: "zero_std", 4: "surplus", 5: "surplus"}


def test_too_few_or_doubled_groups_are_refused():
    with pytest.raises(DataError, match=r"rollout_batch_size = 2 .* only 1 of 2"):
        choose_groups([GroupVerdict(0), GroupVerdict(1, keep=False)], 2)
    with pytest.raises(DataError, match=r"\[4\] are listed twice"):
        choose_groups([GroupVerdict(4), GroupVerdict(4)], 1)


def test_the_identity_names_all_four_numbers():
    check_batch_identity(32, 8, 128, 2)
    with pytest.raises(ConfigError, match=r"32 x .*8 = 256 .*100 x .*2 = 200"):
        check_batch_identity(32, 8, 100, 2)
    with pytest.raises(ConfigError, match="global_batch_size must be at least 1"):
        check_batch_identity(32, 8, 0, 2)


def test_steps_hold_whole_rollouts_in_batch_order():
    steps = optimizer_steps([5, 6, 5, 7, 8, 8], global_batch_size=2, num_steps_per_rollout=2)
    assert steps == ((0, 2, 1), (3, 4, 5))


def test_trailing_rollouts_are_never_dropped_silently():
    with pytest.raises(DataError, match=r"5 rollouts in 5 rows, .*2 x .*2 = 4"):
        optimizer_steps(range(5), 2, 2)


def test_fanned_out_rows_share_one_denominator_and_count_once():
    rollouts, sums = [3, 9, 3, 4], [2, 5, 4, 0]
    assert rollout_denominators(sums, rollouts).tolist() == [6.0, 5.0, 6.0, 0.0]
    totals = step_totals([0, 2, 3], rollouts, sums)
    assert (totals.rollouts, totals.tokens, totals.rows) == (2, 6, 3)
    assert totals.trained_rollouts == 1
