"""Pack seals the rewards that the configured estimator starts from, and nothing else changes."""

import math

import pytest

from slime_core.algorithms.advantages.registry import ESTIMATORS
from slime_core.errors import RewardError
from tests.unit.stages.test_pack import lab, packed, rows
from tests.unit.store.builders import finished_sample

REWARDS = (1.0, 0.0, 0.0, 3.0)
STD = math.sqrt(2.0)  # of 1, 0, 0, 3 with mean 1: squares 0 + 1 + 1 + 4, by 3
GRPO = [0.0, -1 / (STD + 1e-6), -1 / (STD + 1e-6), 2 / (STD + 1e-6)]
CENTRED = [0.0, -1.0, -1.0, 2.0]
EXPECTED = {
    "grpo": GRPO,
    "gspo": GRPO,
    "cispo": GRPO,
    "sapo": GRPO,
    "gmpo": GRPO,
    "ipo": GRPO,
    "dr_grpo": CENTRED,
    "rloo": [0.0, -4 / 3, -4 / 3, 8 / 3],
    "opo": [1 - 1.3, -1.3, -1.3, 3 - 1.3],  # lengths 1, 2, 3, 4: (1 x 1 + 4 x 3) / 10
    "gpg": [0.0, -2.0, -2.0, 4.0],  # half of the groups differ
    "max_rl": CENTRED,  # the mean is 1
    "pass_at_k": [0.0, 0.0, 0.0, 2 / (STD + 1e-6)],
    "reinforce_plus_plus": list(REWARDS),
    "reinforce_plus_plus_baseline": CENTRED,
    "ppo": list(REWARDS),
    "remax": [0.75, -0.25, -0.25, 2.75],  # the greedy answer of each group got 0.25
}


def content(tmp_path, name, **overrides):
    samples = [finished_sample(0, i, length=i + 1) for i in range(4)]
    group = rows(0, *REWARDS)
    for sample, old in zip(samples, group.samples, strict=True):
        sample.reward = old.reward
    group.samples[:] = samples
    other = rows(1, 2.0, 2.0, 2.0, 2.0)
    if name == "remax":
        for sample in (*group.samples, *other.samples):
            sample.metadata["greedy"] = {"reward": 0.25, "response": "x", "tokens": [1]}
    whiten = ESTIMATORS[name].needs_whitening
    ctx = lab(tmp_path, advantage_estimator=name, normalize_advantages=whiten, **overrides)
    return packed(ctx, [group], [other])


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_each_estimator_transforms_rewards_in_its_groups(tmp_path, name):
    found = content(tmp_path, name)
    assert found.rewards[:4] == pytest.approx(EXPECTED[name], rel=1e-9)
    constant = {"ppo": 2.0, "reinforce_plus_plus": 2.0, "remax": 1.75}.get(name, 0.0)
    assert found.rewards[4:] == [constant] * 4
    assert found.raw_rewards == [*REWARDS, 2.0, 2.0, 2.0, 2.0]


def test_every_estimator_that_can_be_configured_is_covered():
    assert set(EXPECTED) == set(ESTIMATORS)


def test_groups_without_a_greedy_answer_are_refused(tmp_path):
    ctx = lab(tmp_path, advantage_estimator="remax")
    with pytest.raises(RewardError, match="were not drawn when these groups were generated"):
        packed(ctx, [rows(0, 1.0, 0.0)], [rows(1, 1.0, 1.0)])


def test_the_normalisations_can_be_left_out(tmp_path):
    plain = content(tmp_path / "a", "grpo", disable_rewards_normalization=True)
    assert plain.rewards == plain.raw_rewards
    centred = content(tmp_path / "b", "grpo", disable_grpo_std_normalization=True)
    assert centred.rewards[:4] == pytest.approx(CENTRED)
