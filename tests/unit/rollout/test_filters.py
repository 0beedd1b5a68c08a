import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import PluginError
from slime_core.rollout.filters import DynamicFilterOutput, has_spread, is_dropped, judge
from slime_core.sample import Sample

VECTORS = Path(__file__).parents[2] / "vectors" / "edge_cases.jsonl"
CASES = [row for row in map(json.loads, VECTORS.open(encoding="utf-8")) if row["kind"] == "filter"]
ARGS = SimpleNamespace(reward_key=None)


def group(*rewards):
    return [Sample(reward=reward) for reward in rewards]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_vectors(case):
    given = case["input"]
    if case["fn"] == "nonzero_std_keep":
        assert has_spread(given["rewards"]) == case["expected"]
    else:
        verdict = DynamicFilterOutput(
            given["keep"], keep_when_insufficient=given["keep_when_insufficient"]
        )
        assert is_dropped(verdict, given["remaining"], given["target"]) == case["expected"]


@pytest.mark.parametrize(
    ("keep", "fallback", "remaining", "dropped"),
    [
        (True, False, 9, False),
        (True, True, 1, False),
        (False, False, 8, True),
        (False, True, 9, True),
        (False, True, 8, False),
        (False, True, 3, False),
    ],
)
def test_a_fallback_group_stays_only_where_the_target_needs_it(keep, fallback, remaining, dropped):
    verdict = DynamicFilterOutput(keep, keep_when_insufficient=fallback)
    assert is_dropped(verdict, remaining, target=8) == dropped


@given(value=st.floats(-1e6, 1e6), size=st.integers(1, 16))
def test_equal_rewards_have_no_spread(value, size):
    assert not has_spread([value] * size)


def test_float32_noise_is_no_spread_but_a_small_difference_is():
    third = float(np.float32(0.1))
    assert not has_spread([third, third + 1e-9, third])
    assert has_spread([1000.0, 1000.00001, 1000.0])
    assert not has_spread([]) and not has_spread([1.0])
    assert not has_spread([math.nan, 1.0])


def test_reasons_name_the_reward():
    path = "check_reward_nonzero_std"
    assert judge(path, ARGS, group(1.0, 1.0)) == DynamicFilterOutput(False, "zero_std_1.0")
    assert judge(path, ARGS, group(0.0, 0.0)).reason == "zero_std_0.0"
    assert judge(path, ARGS, group(0.0, 1.0)) == DynamicFilterOutput(True)
    fallback = judge("check_reward_nonzero_std_with_fallback", ARGS, group(1.0, 1.0))
    assert (fallback.keep, fallback.keep_when_insufficient) == (False, True)


def test_slimes_own_path_and_no_path():
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    assert not judge(path, ARGS, group(1.0, 1.0)).keep
    assert judge(None, ARGS, group(1.0, 1.0)).keep


def test_the_filter_looks_at_the_rewards_key():
    args = SimpleNamespace(reward_key="acc")
    samples = [Sample(reward={"acc": 1.0, "length": n}) for n in range(3)]
    assert not judge("check_reward_nonzero_std", args, samples).keep


def test_filters_of_users(tmp_path):
    path = tmp_path / "f.py"
    path.write_text(
        "def yes(args, samples, **kw): return True\n"
        "def no(args, samples, **kw): return False\n"
        "def odd(args, samples, **kw): return 'drop'\n"
    )
    assert judge(f"{path}:yes", ARGS, []).keep
    assert not judge(f"{path}:no", ARGS, []).keep
    with pytest.raises(PluginError, match="returned 'drop'"):
        judge(f"{path}:odd", ARGS, [])
