import math

import pytest
import torch

from slime_core.algorithms.losses.reductions import token_weights, weighted_sum
from slime_core.errors import ConfigError

ROWS = torch.tensor([0, 0, 0, 1, 1, 2])
MASK = torch.tensor([True, True, False, True, True, False])
VALUES = torch.tensor([1.0, 2.0, math.nan, 4.0, 8.0, math.inf], dtype=torch.float64)


def reduce(mode, denominators, **counts):
    weights = token_weights(mode, ROWS, torch.tensor(denominators).double(), **counts)
    return weighted_sum(VALUES, MASK, weights).item()


def test_sample_mean_counts_a_fully_masked_rollout_as_zero():
    assert reduce("sample_mean", [2, 2, 0], rollouts=3, tokens=4) == pytest.approx((1.5 + 6) / 3)


def test_fanned_out_siblings_share_a_denominator_and_count_once():
    together = reduce("sample_mean", [4, 4, 0], rollouts=2, tokens=4)
    assert together == pytest.approx((1 + 2 + 4 + 8) / 4 / 2)


def test_token_mean_divides_by_the_global_count_it_is_given():
    assert reduce("token_mean", [2, 2, 0], rollouts=3, tokens=40) == pytest.approx(15 / 40)


def test_constant_length_divides_by_length_and_rollouts():
    value = reduce("constant_length", [2, 2, 0], rollouts=3, tokens=4, constant_length=16)
    assert value == pytest.approx(15 / 48)


def test_a_step_without_tokens_is_zero_not_nan():
    nothing = torch.zeros(6, dtype=torch.bool)
    for mode in ("sample_mean", "token_mean"):
        weights = token_weights(mode, ROWS, torch.zeros(3), rollouts=3, tokens=0)
        assert weighted_sum(VALUES, nothing, weights).item() == 0.0


def test_unknown_mode_and_missing_length_are_refused():
    with pytest.raises(ConfigError, match="unknown reduction 'mean'"):
        reduce("mean", [1, 1, 1], rollouts=1, tokens=1)
    with pytest.raises(ConfigError, match="length above 0"):
        reduce("constant_length", [1, 1, 1], rollouts=1, tokens=1)
