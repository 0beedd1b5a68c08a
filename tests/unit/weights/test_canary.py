"""Fixed tokens and an honest comparison: what proves which weights an engine serves."""

import math

import pytest

from slime_core.errors import EngineError
from slime_core.weights.sync.canary import CANARY_TOKENS, canary_tokens, largest_gap, tolerance_for


def test_tokens_are_fixed_valid_and_varied():
    tokens = canary_tokens(100, 256)
    assert len(tokens) == CANARY_TOKENS == 64
    assert tokens == canary_tokens(100, 1000), "the same for every run of a model"
    assert tokens[:4] == (85, 62, 3, 8), "and for every version of this program"
    assert all(0 <= token < 100 for token in tokens) and len(set(tokens)) > 30


def test_the_canary_with_one_new_token_fits_into_the_context():
    assert len(canary_tokens(100, 16)) == 15


def test_the_largest_difference_counts_and_nan_is_never_small():
    assert largest_gap([-1.0, -2.0], [-1.5, -2.0]) == 0.5
    assert largest_gap([-1.0, math.nan], [-1.0, -2.0]) == math.inf
    assert largest_gap([-1.0], [-math.inf]) == math.inf
    assert largest_gap([], []) == 0.0


def test_another_number_of_values_is_an_error():
    with pytest.raises(EngineError, match="1 canary log-probs came back, 2 were expected"):
        largest_gap([-1.0, -2.0], [-1.0])


def test_the_bound_follows_the_precision_unless_configured():
    assert tolerance_for("float32", None) == 1e-5
    assert tolerance_for("bfloat16", None) == 0.3
    assert tolerance_for("float32", 0.5) == 0.5
