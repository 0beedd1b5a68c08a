"""Rewards of a group's samples, and what an answer that cannot be graded costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from slime_core.errors import RewardError
from slime_core.rewards.hub import RewardHub, settle
from slime_core.rewards.result import Score, ScoreFailure, ScoreResult, to_result
from slime_core.sample import Sample

BY_FUNCTION = "the function that answered"
"""Who gave a reward that was there already, in messages."""


class GradingStoppedError(RewardError):
    """A failure that ends the run: as the policy wants, or since nothing can be graded so."""


@dataclass(frozen=True)
class Scored:
    """What grading a group gave.

    Attributes:
        graders: [samples] digest of each sample's own grader.
        drop: why the group cannot be trained, None where it can.
    """

    graders: list[str | None]
    drop: str | None = None


@dataclass
class Scorer:
    """Grades groups by the configured policy.

    Attributes:
        hub: the graders.
        policy: `reward_error_policy`.
    """

    hub: RewardHub
    policy: str = "mask"
    _graded: bool = field(default=False, init=False)

    async def score(self, samples: Sequence[Sample], given: str | None = None) -> Scored:
        """Sets the reward of every sample that has none yet. One that a function set and that is
        not finite is a failure like a grader's.

        Args:
            given: digest of the function that set the rewards which are there already.

        Raises:
            GradingStoppedError: the policy is "fail", or a dict reward does not have the entry
                that is trained and none did before.
            ConfigError: a sample names a grader that does not exist.
        """
        waiting = [sample for sample in samples if sample.reward is None]
        results: list[ScoreResult] = [*(await self.hub.score_group(waiting) if waiting else ())]
        graded = {id(sample) for sample in waiting}
        for sample in samples:
            if id(sample) in graded:
                continue
            key = self.hub.settings.reward_key
            result = to_result(sample.reward, given or "", key, BY_FUNCTION)
            sample.reward = result.value if isinstance(result, Score) else None
            if isinstance(result, ScoreFailure):
                waiting.append(sample)
                results.append(result)
        for sample, result in zip(waiting, results, strict=True):
            self._settle(sample, result)
        return Scored(_graders(samples, waiting, results, given), self._drop(samples, results))

    def _settle(self, sample: Sample, result: ScoreResult) -> None:
        if isinstance(result, Score):
            self._graded = True
        elif result.reason == "reward_key" and not self._graded:
            raise GradingStoppedError(result.message)
        elif self.policy == "fail":
            raise GradingStoppedError(
                f"{sample.describe()}: {result.message} ({result.reason}); "
                "reward_error_policy is fail"
            )
        settle(sample, result, self.policy)
        if isinstance(result, ScoreFailure) and self.hub.settings.reward_key:
            sample.reward = None if sample.reward is None else {self.hub.settings.reward_key: 0.0}

    def _drop(self, samples: Sequence[Sample], results: Sequence[ScoreResult]) -> str | None:
        reasons = Counter(r.reason for r in results if isinstance(r, ScoreFailure))
        if not reasons or self.policy == "zero":
            return None
        if self.policy == "mask" and reasons.total() < len(samples):
            return None
        return f"reward_error/{reasons.most_common(1)[0][0]}"


def _graders(
    samples: Sequence[Sample],
    waiting: Sequence[Sample],
    results: Sequence[ScoreResult],
    given: str | None,
) -> list[str | None]:
    by_sample = {id(s): result.grader for s, result in zip(waiting, results, strict=True)}
    return [by_sample.get(id(sample), given) for sample in samples]
