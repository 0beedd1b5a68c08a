"""The greedy answer to a group's prompt: ReMax compares with it, and nothing trains it.

It stands in the metadata of each row as `greedy`: {"response", "tokens", "reward"}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slime_core.errors import RewardError
from slime_core.rewards.result import FAILED_BEFORE
from slime_core.rollout.drawn import as_drawn
from slime_core.rollout.runtime import Runtime
from slime_core.sample import Sample

MARK = "greedy"
NOT_OF_THE_PROMPT = (MARK, FAILED_BEFORE)


def prompt_alone(row: Sample) -> Sample:
    """A sample of the same prompt without a response, to be answered greedily."""
    prompt = as_drawn(row)
    prompt.metadata = {
        name: value for name, value in row.metadata.items() if name not in NOT_OF_THE_PROMPT
    }
    return prompt


def greedily(runtime: Runtime) -> Runtime:
    """The same rollout at temperature 0."""
    params = {**runtime.sampling.params, "temperature": 0.0}
    return replace(runtime, sampling=replace(runtime.sampling, params=params))


def mark(rows: Sequence[Sample], answers: Sequence[Sample], reward_key: str | None) -> None:
    """Writes the graded greedy answer into the group's rows.

    Args:
        answers: its rows; a generate function may have made several, whose rewards are averaged.

    Raises:
        RewardError: it has no reward.
    """
    rewards = [_number(answer, reward_key) for answer in answers]
    found: dict[str, Any] = {
        "response": answers[-1].response,
        "tokens": answers[-1].tokens[len(answers[-1].tokens) - answers[-1].response_length :],
        "reward": sum(rewards) / len(rewards),
    }
    for row in rows:
        row.metadata = {**row.metadata, MARK: found}


def _number(answer: Sample, reward_key: str | None) -> float:
    reward = answer.reward
    if isinstance(reward, dict):
        reward = reward.get(reward_key or "")
    if reward is None:
        raise RewardError(f"the greedy answer to {answer.describe()} has no reward")
    return float(reward)
