import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.algorithms.reward_shaping import cosine_scaled, is_zero_std, overlong_penalty
from slime_core.errors import ConfigError, DataError


@given(tokens=st.integers(0, 400), factor=st.floats(0, 5))
def test_the_overlong_penalty_falls_from_zero_to_minus_factor_and_stops(tokens, factor):
    penalty = overlong_penalty(tokens, 128, 32, factor)
    assert -factor <= penalty <= 0
    assert penalty >= overlong_penalty(tokens + 1, 128, 32, factor)
    if tokens <= 96:
        assert penalty == 0
    if tokens >= 128:
        assert penalty == -factor


def test_cosine_rewards_prefer_short_right_and_long_wrong_answers():
    assert cosine_scaled(True, 0, 100) == 1.0
    assert cosine_scaled(True, 100, 100) == pytest.approx(0.5)
    assert cosine_scaled(True, 50, 100) == pytest.approx(0.75)
    assert cosine_scaled(False, 0, 100) == -1.0
    assert cosine_scaled(False, 50, 100) == pytest.approx(-0.75)
    assert cosine_scaled(False, 900, 100) == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("rewards", "zero"),
    [
        ([1, 1, 1], True),
        ([0.1] * 7, True),
        ([1, 0, 0], False),
        ([5.0], True),
        ([1e6, 1e6 + 1e-7], True),
        ([0.1, 0.1 + 1e-5], False),
        ([1e4, 1e4 + 1e-4], False),
    ],
)
def test_zero_std_in_float64(rewards, zero):
    assert is_zero_std(rewards) is zero


def test_what_cannot_be_judged_is_an_error():
    for rewards in ([], [1.0, math.nan]):
        with pytest.raises(DataError, match="finite numbers"):
            is_zero_std(rewards)
    with pytest.raises(ConfigError, match="buffer 200"):
        overlong_penalty(1, 128, 200)
    with pytest.raises(ConfigError, match="max_tokens"):
        cosine_scaled(True, 1, 0)
