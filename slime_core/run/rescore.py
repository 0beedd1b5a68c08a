"""Grading stored samples again with another grader, without a GPU and without changing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from slime_core.errors import StoreError
from slime_core.rewards.result import Score, ScoreResult
from slime_core.sample import Sample
from slime_core.store.cache import NodeCache
from slime_core.store.parts import KEPT
from slime_core.store.scores import RowScore, put_scores
from slime_core.store.seal import open_groups, read_seal

SPARED = ("experts",)
"""Planes that graders do without."""


class Grader(Protocol):
    """What is needed of rewards.hub.RewardHub."""

    def grader_digest(self, sample: Sample) -> str: ...
    async def score_group(self, samples: Sequence[Sample]) -> list[ScoreResult]: ...


@dataclass(frozen=True)
class Rescored:
    """One segment, as it was graded and as it is graded now.

    Attributes:
        scorer: names the overlay.
        reward, reward_now: means over the rows that both graded.
        changed: rows with another number.
        reordered: groups in which two samples changed their order.
        failed: rows that the grader could not grade.
    """

    segment: int
    scorer: str
    rows: int
    reward: float
    reward_now: float
    changed: int
    groups: int
    reordered: int
    failed: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


async def rescore(cache: NodeCache, grader: Grader, segment: int) -> Rescored:
    """Grades the kept groups of a sealed segment and stores the overlay.

    Raises:
        StoreError: the segment is not sealed.
        DigestError: its rows are gone or damaged.
    """
    seal = read_seal(cache.backend, segment)
    if seal is None:
        raise StoreError(f"segment {segment} is not sealed")
    kept = [group for group in seal.groups if group.entry.verdict == KEPT]
    files = open_groups(cache, kept)
    scores: list[RowScore] = []
    pairs: list[np.ndarray] = []
    scorer = ""
    for group in kept:
        place = (group.entry.group_id, group.entry.attempt)
        file, number = files[place]
        samples = file.rows(number).to_samples(spared=SPARED)
        before = [_number(sample.reward) for sample in samples]
        for sample in samples:  # the grader that is asked for, not the row's own
            sample.custom_rm_path = None
            sample.metadata = {k: v for k, v in sample.metadata.items() if k != "rm_type"}
        scorer = scorer or grader.grader_digest(samples[0])
        results = await grader.score_group(samples)
        scores += [_row(*place, i, result) for i, result in enumerate(results)]
        now = [r.number if isinstance(r, Score) else np.nan for r in results]
        pairs.append(np.asarray([before, now]))
    put_scores(cache.backend, scorer, seal, scores)
    both = np.concatenate(pairs, axis=1) if pairs else np.zeros((2, 0))
    known = both[:, ~np.isnan(both).any(axis=0)]
    return Rescored(
        segment, scorer, len(scores),
        float(known[0].mean()) if known.size else float("nan"),
        float(known[1].mean()) if known.size else float("nan"),
        changed=int((known[0] != known[1]).sum()),
        groups=len(pairs),
        reordered=sum(reordered(before, now) for before, now in pairs),
        failed=sum(score.reward is None for score in scores),
    )  # fmt: skip


def reordered(before: np.ndarray, now: np.ndarray) -> bool:
    """True if some two samples stand in another order than before; ties count as an order."""
    known = ~(np.isnan(before) | np.isnan(now))
    first, second = before[known], now[known]
    return bool(
        (np.sign(np.subtract.outer(first, first)) != np.sign(np.subtract.outer(second, second)))
        .any()
    )  # fmt: skip


def _number(reward: Any) -> float:
    return float(reward) if isinstance(reward, int | float) else float("nan")


def _row(group_id: int, attempt: int, row: int, result: ScoreResult) -> RowScore:
    if not isinstance(result, Score):
        return RowScore(group_id, attempt, row, None, failure=f"{result.reason}: {result.message}")
    values = result.value if isinstance(result.value, dict) else None
    return RowScore(group_id, attempt, row, result.number, values)
