"""Which evaluations a run owes: (version, dataset) pairs, a pure function of what is stored.

A version is the number of iterations contained in the weights: 0 before training, num_rollout at
the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EvalSchedule:
    """When to evaluate.

    Attributes:
        num_rollout: iterations of the run.
        interval: every so many iterations; None evaluates never.
        before_train: also the initial weights.
        at_end: also the final weights, whatever the interval.
        epoch_ends: versions at which a pass over the data ends, evaluated too.
    """

    num_rollout: int
    interval: int | None
    before_train: bool = True
    at_end: bool = True
    epoch_ends: frozenset[int] = frozenset()

    def is_due(self, version: int) -> bool:
        """Whether this version is to be evaluated."""
        if not self.interval or not 0 <= version <= self.num_rollout:
            return False
        if version == 0:
            return self.before_train
        if version == self.num_rollout and self.at_end:
            return True
        return version % self.interval == 0 or version in self.epoch_ends

    def due_versions(self, through: int | None = None) -> list[int]:
        """All versions to be evaluated, up to `through` (default: the end)."""
        last = self.num_rollout if through is None else min(through, self.num_rollout)
        return [version for version in range(last + 1) if self.is_due(version)]


@dataclass(frozen=True, order=True)
class Obligation:
    """One evaluation that is owed."""

    version: int
    dataset: str


@dataclass(frozen=True)
class Owed:
    """What is to be evaluated.

    Attributes:
        now: with the weights that are served.
        missed: of older versions; they need exported weights, or are recorded as missed.
    """

    now: tuple[Obligation, ...]
    missed: tuple[Obligation, ...]


def owed(
    schedule: EvalSchedule,
    datasets: Sequence[str],
    served: int,
    settled: Collection[tuple[int, str]],
) -> Owed:
    """Evaluations due up to the served version and not settled yet, oldest first.

    Args:
        schedule: when to evaluate.
        datasets: names, in the order of evaluation.
        served: version that the engines serve.
        settled: (version, dataset) with a stored result, or recorded as missed.
    """
    open_ones = [
        Obligation(version, dataset)
        for version in schedule.due_versions(served)
        for dataset in datasets
        if (version, dataset) not in settled
    ]
    return Owed(
        now=tuple(one for one in open_ones if one.version == served),
        missed=tuple(one for one in open_ones if one.version != served),
    )


def epoch_end_versions(num_rollout: int, groups_per_iteration: int, prompts: int) -> Iterable[int]:
    """Versions whose iterations complete a pass over the data, for synchronous training."""
    return (
        version
        for version in range(1, num_rollout + 1)
        if version * groups_per_iteration // prompts
        > (version - 1) * groups_per_iteration // prompts
    )
