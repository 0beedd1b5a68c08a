from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.evaluation.passk import average_at_k, pass_at_k, pass_curve


@given(tries=st.lists(st.booleans(), min_size=1, max_size=9), data=st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass(tries, data):
    k = data.draw(st.integers(1, len(tries)))
    draws = list(combinations(tries, k))
    expected = sum(any(draw) for draw in draws) / len(draws)
    assert pass_at_k(len(tries), sum(tries), k) == pytest.approx(expected, abs=1e-12)


def test_large_numbers_stay_exact():
    assert pass_at_k(100_000, 1, 1) == pytest.approx(1e-5, rel=1e-9)
    assert pass_at_k(1000, 500, 1000) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_what_has_no_estimate_is_refused(n, c, k):
    with pytest.raises(ValueError, match="no pass@"):
        pass_at_k(n, c, k)


def test_curve_goes_by_powers_of_two_and_to_the_end():
    groups = [[True] * 3 + [False] * 3, [False] * 6]
    curve = pass_curve(groups)
    assert list(curve) == [1, 2, 4, 6]
    assert curve[1] == pytest.approx(0.25)
    assert curve[6] == 0.5
    assert list(pass_curve([[True] * 4])) == [1, 2, 4]
    assert pass_curve([]) == {}


def test_prompts_with_too_few_tries_do_not_count_for_larger_k():
    curve = pass_curve([[True, True, True, True], [False]])
    assert curve == {1: 0.5, 2: 1.0, 4: 1.0}


def test_average_weighs_prompts_alike():
    assert average_at_k([[1.0, 0.0], [1.0], []]) == 0.75
    with pytest.raises(ValueError, match="no scored"):
        average_at_k([[]])
