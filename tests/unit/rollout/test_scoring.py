"""What an answer that cannot be graded costs, by policy, and who graded what."""

import asyncio
from typing import Any

import pytest

from slime_core.errors import RewardError
from slime_core.rewards.hub import RewardHub, RewardSettings
from slime_core.rollout.scoring import GradingStoppedError, Scored, Scorer
from slime_core.sample import Sample

PLUGIN = """
async def reward(args, sample, **kwargs):
    if sample.response == "bad":
        raise ValueError("cannot say")
    if sample.response == "dict":
        return {"score": 1.0, "style": 0.5}
    return float(sample.response)
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "rm.py").write_text(PLUGIN)
    return f"{tmp_path / 'rm.py'}:reward"


def scored(samples: list[Sample], policy: str = "mask", **settings: Any) -> Scored:
    async def body() -> Scored:
        hub = RewardHub(RewardSettings(**settings))
        try:
            return await Scorer(hub, policy).score(samples)
        finally:
            await hub.close()

    return asyncio.run(body())


def group(*responses: str) -> list[Sample]:
    return [Sample(index=i, response=text) for i, text in enumerate(responses)]


@pytest.mark.parametrize(
    ("policy", "reward", "removed", "drop"),
    [
        ("mask", 0.0, True, None),
        ("zero", 0.0, False, None),
        ("drop", None, False, "reward_error/exception"),
    ],
)
def test_a_failure_costs_what_the_policy_says(path, policy, reward, removed, drop):
    samples = group("1", "bad", "3")
    found = scored(samples, policy, custom_rm_path=path)
    assert [sample.reward for sample in samples] == [1.0, reward, 3.0]
    assert [sample.remove_sample for sample in samples] == [False, removed, False]
    assert samples[1].metadata["reward_error"]["reason"] == "exception"
    assert found.drop == drop


def test_fail_ends_the_run_and_names_sample_and_reason(path):
    with pytest.raises(GradingStoppedError, match=r"sample 1 of .* raised ValueError: cannot say"):
        scored(group("1", "bad"), "fail", custom_rm_path=path)
    assert issubclass(GradingStoppedError, RewardError)


def test_a_group_of_which_nothing_could_be_graded_is_dropped(path):
    assert scored(group("bad", "bad"), custom_rm_path=path).drop == "reward_error/exception"
    assert scored(group("bad", "bad"), "zero", custom_rm_path=path).drop is None


def test_a_dict_without_its_key_is_an_error_at_the_first_sample(path):
    with pytest.raises(GradingStoppedError, match="choose one of score, style with --reward-key"):
        scored(group("dict", "dict"), custom_rm_path=path)
    with pytest.raises(GradingStoppedError, match="no 'acc'"):
        scored(group("dict"), custom_rm_path=path, reward_key="acc")


def test_later_a_missing_key_costs_its_sample_only(path):
    samples = group("dict", "3")
    assert scored(samples, custom_rm_path=path, reward_key="score").drop is None
    assert samples[0].reward == {"score": 1.0, "style": 0.5}
    assert (samples[1].reward, samples[1].remove_sample) == ({"score": 0.0}, True)


def test_each_member_of_a_group_records_its_own_grader(path):
    samples = group("7", "7", "7")
    samples[0].custom_rm_path = path
    samples[1].metadata["rm_type"] = "random"
    samples[2].label = "7"
    found = scored(samples, rm_type="exact_match")
    assert [sample.reward for sample in samples][::2] == [7.0, 1.0]
    assert len(set(found.graders)) == 3 and None not in found.graders


def test_a_reward_that_is_there_is_not_given_again(path):
    samples = group("bad", "2")
    samples[0].reward = 5.0

    async def body() -> Scored:
        hub = RewardHub(RewardSettings(custom_rm_path=path))
        return await Scorer(hub).score(samples, given="by the generate function")

    found = asyncio.run(body())
    assert [sample.reward for sample in samples] == [5.0, 2.0]
    assert found.graders[0] == "by the generate function" != found.graders[1]


def test_a_reward_of_a_function_that_is_not_finite_is_a_failure_of_its_sample():
    def given(policy: str) -> tuple[list[Sample], Scored]:
        samples = [Sample(index=i, reward=value) for i, value in enumerate((1.0, float("nan")))]
        return samples, scored(samples, policy)

    (good, bad), result = given("mask")
    assert (good.reward, bad.reward, bad.remove_sample, result.drop) == (1.0, 0.0, True, None)
    assert bad.metadata["reward_error"]["reason"] == "non_finite"
    (_, bad), result = given("drop")
    assert (bad.reward, result.drop) == (None, "reward_error/non_finite")
    with pytest.raises(GradingStoppedError, match="the function that answered returned nan"):
        given("fail")
