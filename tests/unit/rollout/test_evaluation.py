"""What an evaluation says of its answers."""

import pytest

from slime_core.errors import RewardError
from slime_core.rollout.evaluation import eval_metrics
from slime_core.sample import Sample, Status


def answer(reward: object, length: int = 2, status: Status = Status.COMPLETED) -> Sample:
    return Sample(reward=reward, response_length=length, status=status)  # type: ignore[arg-type]


def test_means_lengths_and_pass_at_k():
    groups = [
        [answer(1.0, 2), answer(0.0, 4)],
        [answer(0.0, 6, Status.TRUNCATED), answer(0.0, 8)],
    ]
    assert eval_metrics(groups, None) == {
        "reward": 0.25,
        "response_len/mean": 5.0,
        "response_len/max": 8.0,
        "truncated_ratio": 0.25,
        "samples": 4.0,
        "pass@1": 0.25,
        "pass@2": 0.5,
    }


def test_one_entry_of_many_rewards_counts():
    groups = [[answer({"score": 1.0, "length": 7.0})]]
    assert eval_metrics(groups, "score")["reward"] == 1.0
    with pytest.raises(RewardError, match="has no reward that is a number"):
        eval_metrics(groups, None)
