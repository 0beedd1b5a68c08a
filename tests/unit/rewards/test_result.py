import json

import numpy as np
import pytest

from slime_core.errors import ConfigError, RewardError
from slime_core.rewards.hub import settle
from slime_core.rewards.result import Score, ScoreFailure, plain, to_result
from slime_core.rewards.text import label_values, strip_end_tokens
from slime_core.sample import Sample
from slime_core.store.codec import decode_samples, samples_to_rows


@pytest.mark.parametrize(
    "value", [1, True, 0.5, np.float32(0.5), np.int64(3), np.array(0.25), np.bool_(True)]
)
def test_numbers_of_all_kinds_become_floats(value):
    result = to_result(value, "d", None, "g")
    assert type(result.number) is float and result.number == float(value)


@pytest.mark.parametrize("value", ["1", None, [1.0], np.array([1.0]), 1j, object()])
def test_what_is_no_number_is_never_a_zero(value):
    assert to_result(value, "d", None, "g").reason == "not_a_number"


def test_what_is_not_finite_is_refused():
    for value in (float("nan"), float("-inf"), np.float64("nan"), 10**400):
        assert to_result(value, "d", None, "g").reason == "non_finite"


def test_lists_in_dict_rewards_stay_as_they_are_through_workers_and_store():
    given = {"score": 1.0, "steps": [0.5, [1, "a"], {"ok": (True, None)}], "by": np.array([1, 2])}
    kept = {"score": 1.0, "steps": [0.5, [1, "a"], {"ok": [True, None]}], "by": [1, 2]}
    told = json.loads(json.dumps(plain(given)))  # as a worker process tells it
    assert to_result(given, "d", "score", "g") == to_result(told, "d", "score", "g")
    result = to_result(given, "d", "score", "g")
    assert (result.value, result.number) == (kept, 1.0)
    [back] = decode_samples(samples_to_rows([Sample(reward=result.value)]))
    assert back.reward == kept


def test_what_is_nested_in_itself_is_refused():
    endless: list = []
    endless.append(endless)
    assert to_result({"score": 1.0, "x": endless}, "d", "score", "g").reason == "not_a_number"


FAILURE = ScoreFailure("timeout", "took too long", "d")


def test_policies_for_failures():
    masked, zero, dropped = Sample(), Sample(), Sample(metadata={"k": 1})
    assert settle(masked, FAILURE) and settle(zero, FAILURE, "zero")
    assert not settle(dropped, FAILURE, "drop")
    assert (masked.reward, masked.remove_sample) == (0.0, True)
    assert (zero.reward, zero.remove_sample) == (0.0, False)
    assert dropped.reward is None
    for sample in (masked, zero, dropped):
        assert sample.metadata["reward_error"]["reason"] == "timeout"
    with pytest.raises(RewardError, match=r"took too long \(timeout\)"):
        settle(Sample(), FAILURE, "fail")
    with pytest.raises(ConfigError, match="mask, zero, drop or fail"):
        settle(Sample(), FAILURE, "ignore")
    good = Sample()
    assert settle(good, Score({"a": 1.0}, 1.0, "d"), "fail") and good.reward == {"a": 1.0}


def test_labels_with_several_answers():
    assert label_values('["a", 4]') == ["a", "4"]
    assert label_values("[0, 1)") == ["[0, 1)"]
    assert label_values("x") == ["x"]


def test_end_tokens_are_stripped_as_often_as_they_come():
    assert strip_end_tokens("a </s> <|im_end|>\n</s>") == "a"
