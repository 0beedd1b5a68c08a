"""One segment: from logged draws to stored groups, until enough are kept."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from slime_core.errors import DataError, DeadlineError, EngineError, RewardError
from slime_core.rollout.part_writer import PartWriter
from slime_core.sample import Sample
from slime_core.store.draws import Draw
from slime_core.store.parts import DROPPED, FAILED, KEPT, GroupRows
from slime_core.store.seal import Segment
from slime_core.waits import together

log = logging.getLogger(__name__)
FURTHER_DRAWS_PER_GROUP = 4
GROUP_ERRORS = (DataError, EngineError, RewardError, DeadlineError)


@dataclass(frozen=True)
class SegmentPlan:
    """What a segment is to reach.

    Attributes:
        segment: its number.
        target: groups that must be kept.
        max_attempts: attempts at a group before it is dropped.
    """

    segment: int
    target: int
    max_attempts: int


class SegmentLoop:
    """Generates, scores and stores the groups of one segment.

    Args:
        plan: its target.
        finish: brings a group's samples to their end and scores them; returns the grader digest.
        further: logs further draws when groups were dropped.
        writer: stores groups.
    """

    def __init__(
        self,
        plan: SegmentPlan,
        finish: Callable[[list[Sample]], Awaitable[str]],
        further: Callable[[int], list[Draw]],
        writer: PartWriter,
    ) -> None:
        self._plan = plan
        self._finish = finish
        self._further = further
        self._writer = writer
        self._reasons: Counter[str] = Counter()

    async def run(self, draws: Sequence[Draw], adopted: Segment) -> None:
        """Works until `target` groups are kept and every draw has ended.

        Raises:
            RewardError: too many groups were dropped; names the most frequent reason. A later
                start, with the reason removed, may draw as many again.
            StoreError: a part could not be written.
        """
        finished = adopted.finished
        attempts = adopted.next_attempts
        todo = [draw for draw in draws if draw.group_id not in finished]
        kept = len(adopted.kept)
        further_left = FURTHER_DRAWS_PER_GROUP * self._plan.target
        while True:
            outcomes = await together(
                self._group(draw, attempts.get(draw.group_id, 0)) for draw in todo
            )
            kept += sum(outcomes)
            missing = self._plan.target - kept
            if missing <= 0:
                return
            if missing > further_left:
                raise RewardError(self._too_many_dropped(kept))
            further_left -= missing
            todo = await asyncio.to_thread(self._further, missing)

    async def _group(self, draw: Draw, attempt: int) -> bool:
        """Attempts a group until it is kept or dropped; True if it is kept."""
        while True:
            samples = [_begin(sample, attempt) for sample in draw.samples]
            rows = GroupRows(draw.group_id, attempt, draw.data_epoch, draw.position, samples)
            try:
                grader = await self._finish(samples)
            except GROUP_ERRORS as error:
                reason = type(error).__name__
                self._reasons[f"{reason}: {error}"] += 1
                log.warning("group %d, attempt %d: %s", draw.group_id, attempt, error)
                last = attempt + 1 >= self._plan.max_attempts
                verdict = DROPPED if last else FAILED
                await self._writer.put(replace(rows, verdict=verdict, reason=reason))
                if last:
                    return False
                attempt += 1
                continue
            await self._writer.put(replace(rows, verdict=KEPT, grader_digest=grader))
            return True

    def _too_many_dropped(self, kept: int) -> str:
        reason, count = (self._reasons.most_common(1) or [("dropped before", 1)])[0]
        return (
            f"segment {self._plan.segment}: only {kept} of {self._plan.target} groups could be "
            f"kept after {FURTHER_DRAWS_PER_GROUP} further draws for each; {count} times: {reason} "
            "(rollout-0.log says more)"
        )


def _begin(drawn: Sample, attempt: int) -> Sample:
    """A sample to generate into; the logged one stays as it is."""
    sample = Sample.from_dict(drawn.to_dict())  # with counters of its own
    sample.tokens = list(drawn.tokens)
    sample.metadata = copy.deepcopy(drawn.metadata)
    sample.attempt = attempt
    return sample
