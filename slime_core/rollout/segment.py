"""One segment: from logged draws to stored groups, until enough are kept."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from slime_core.engines.client import refused
from slime_core.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    EngineError,
    PluginError,
    RewardError,
)
from slime_core.rollout.outcome import Outcome, unstorable
from slime_core.rollout.part_writer import PartWriter
from slime_core.rollout.progress import Progress
from slime_core.rollout.scoring import GradingStoppedError
from slime_core.sample import Sample
from slime_core.store.draws import Draw
from slime_core.store.parts import ABORTED, DROPPED, FAILED, KEPT, GroupRows
from slime_core.store.seal import Segment

log = logging.getLogger(__name__)
CUT_GRACE_S = 10.0
"""How long a segment that has what it needs waits for functions that were cut off."""
FURTHER_DRAWS_PER_GROUP = 4
FURTHER_DRAWS_WITH_FILTER = 32
GROUP_ERRORS = (DataError, EngineError, RewardError, DeadlineError, PluginError, ConfigError)


@dataclass(frozen=True)
class SegmentPlan:
    """What a segment is to reach.

    Attributes:
        segment: its number.
        target: groups that must be kept.
        max_attempts: attempts at a group before it is dropped.
        wave: draws begun at once where too few can be kept.
        further_per_group: further draws for each group of the target before the run stops.
        partial: take the first groups that end, and keep what the others have by then.
    """

    segment: int
    target: int
    max_attempts: int
    wave: int = 1
    further_per_group: int = FURTHER_DRAWS_PER_GROUP
    partial: bool = False


@dataclass
class SegmentWork:
    """What the loop calls.

    Attributes:
        finish: brings a group's samples to their end and scores them; the second argument says
            when to stop and leave them as they are.
        further: logs further draws.
        abort: ends what is in flight at the engines.
    """

    finish: Callable[[list[Sample], Callable[[], bool]], Awaitable[Outcome]]
    further: Callable[[int], list[Draw]]
    abort: Callable[[], Awaitable[None]]


@dataclass
class _State:
    progress: Progress
    attempts: dict[int, int]
    begun: dict[int, Sequence[Sample]]
    claimed: int
    stopping: bool = False
    tasks: dict[asyncio.Task[str], int] = field(default_factory=dict)
    ended: asyncio.Queue[asyncio.Task[str]] = field(default_factory=asyncio.Queue)


class SegmentLoop:
    """Generates, scores and stores the groups of one segment.

    Args:
        plan: its target.
        work: how groups are made.
        writer: stores groups.
    """

    def __init__(self, plan: SegmentPlan, work: SegmentWork, writer: PartWriter) -> None:
        self._plan = plan
        self._work = work
        self._writer = writer
        self._reasons: Counter[str] = Counter()
        self._said: dict[str, str] = {}

    async def run(
        self,
        draws: Sequence[Draw],
        adopted: Segment,
        prefixes: dict[int, Sequence[Sample]] | None = None,
    ) -> None:
        """Works until the segment is decided.

        Args:
            prefixes: by group id, what an earlier segment kept of groups that go on here.

        Raises:
            RewardError: too many groups were dropped; names the most frequent reason. A later
                start, with the reason removed, may draw as many again.
            StoreError: a part could not be written.
        """
        progress = Progress(self._plan.target, first_come=self._plan.partial)
        progress.begin(draw.group_id for draw in draws)
        for group_id, group in adopted.finished.items():
            progress.end(group_id, group.entry.verdict)
        state = _State(progress, adopted.next_attempts, prefixes or {}, progress.kept)
        finished = adopted.finished
        try:
            await self._start(state, [draw for draw in draws if draw.group_id not in finished])
            await self._until_decided(state)
            if self._plan.partial and state.tasks:
                state.stopping = True
                await self._work.abort()
                done, late = await asyncio.wait(state.tasks, timeout=CUT_GRACE_S)
                for task in done:
                    task.result()
                if late:
                    log.info("%d groups that go on outside of engines begin again", len(late))
        finally:
            left = [task for task in state.tasks if not task.done()]
            for task in left:
                task.cancel()
            await asyncio.gather(*state.tasks, return_exceptions=True)
            if left:
                await self._work.abort()

    async def _until_decided(self, state: _State) -> None:
        plan = self._plan
        left = plan.further_per_group * plan.target
        while not state.progress.decided:
            if state.progress.missing and left >= plan.wave:
                left -= plan.wave
                further = await asyncio.to_thread(self._work.further, plan.wave)
                state.progress.begin(draw.group_id for draw in further)
                await self._start(state, further)
                continue
            if not state.tasks:
                raise RewardError(self._too_many_dropped(state.progress.kept))
            ended = [await state.ended.get()]  # asyncio.wait would look at all tasks each time
            while not state.ended.empty():
                ended.append(state.ended.get_nowait())
            for task in ended:
                state.progress.end(state.tasks.pop(task), task.result())

    async def _start(self, state: _State, draws: Sequence[Draw]) -> None:
        for draw in draws:
            task = asyncio.ensure_future(self._expected_group(state, draw))
            state.tasks[task] = draw.group_id
            task.add_done_callback(state.ended.put_nowait)
            await asyncio.sleep(0)  # its request leaves before the next one's samples are copied

    async def _expected_group(self, state: _State, draw: Draw) -> str:
        with self._writer.expecting():
            return await self._group(state, draw)

    async def _group(self, state: _State, draw: Draw) -> str:
        """Attempts a group until it has a verdict that stays in this segment; returns it."""
        attempt = state.attempts.get(draw.group_id)
        prefix = state.begun.get(draw.group_id) if attempt is None else None
        samples = [begin_sample(sample, sample.attempt) for sample in prefix or ()]
        attempt = samples[0].attempt if samples else attempt or 0
        while True:
            samples = samples or [begin_sample(sample, attempt) for sample in draw.samples]
            rows = GroupRows(draw.group_id, attempt, draw.data_epoch, draw.position, samples)
            try:
                outcome = await self._work.finish(samples, lambda: state.stopping)
            except GradingStoppedError:
                raise
            except GROUP_ERRORS as error:
                verdict = await self._failed(rows, draw, error)
                if verdict == DROPPED:
                    return verdict
                samples, attempt = [], attempt + 1
                continue
            return await self._store(state, rows, outcome)

    async def _failed(self, rows: GroupRows, draw: Draw, error: Exception) -> str:
        reason = type(error).__name__
        self._reasons[f"{reason}: {error}"] += 1
        log.warning("group %d, attempt %d: %s", rows.group_id, rows.attempt, error)
        last = rows.attempt + 1 >= self._plan.max_attempts or refused(error)
        verdict = DROPPED if last else FAILED
        if unstorable(rows.samples):  # a plug-in spoiled them
            rows = replace(rows, samples=[begin_sample(one, rows.attempt) for one in draw.samples])
        await self._writer.put(replace(rows, verdict=verdict, reason=reason))
        return verdict

    async def _store(self, state: _State, rows: GroupRows, outcome: Outcome) -> str:
        verdict = outcome.verdict
        if verdict == KEPT:
            if self._plan.partial and state.claimed >= self._plan.target:
                outcome = _to_go_on(outcome)  # it counts for the next segment
            else:
                state.claimed += 1
        if state.claimed >= self._plan.target:
            self._writer.hurry()
        if outcome.verdict == DROPPED:
            self._count(outcome)
        if outcome.verdict == ABORTED and not any(s.response_length for s in outcome.samples):
            return ABORTED  # nothing to keep
        await self._writer.put(
            replace(rows, samples=outcome.samples, verdict=outcome.verdict,
                    reason=outcome.reason, grader_digest=list(outcome.graders) or None)
        )  # fmt: skip
        return outcome.verdict

    def _count(self, outcome: Outcome) -> None:
        """Counts a dropped group by its reason, and logs what was first said of each."""
        reason = outcome.reason or "dropped"
        self._reasons[reason] += 1
        if reason not in self._said:
            self._said[reason] = _said_of(outcome.samples) or reason
            log.warning("a group was dropped (%s): %s", reason, self._said[reason])

    def _too_many_dropped(self, kept: int) -> str:
        reason, count = (self._reasons.most_common(1) or [("dropped before", 1)])[0]
        return (
            f"iteration {self._plan.segment}: only {kept} of {self._plan.target} groups could be "
            f"kept after {self._plan.further_per_group} further draws for each; {count} times: "
            f"{self._said.get(reason, reason)} (rollout-0.log says more)"
        )


def _said_of(samples: Sequence[Sample]) -> str | None:
    """The first grading error of a group in words."""
    errors = (sample.metadata.get("reward_error") for sample in samples)
    return next((error["message"] for error in errors if error), None)


def _to_go_on(outcome: Outcome) -> Outcome:
    """A whole group that is trained later; it is graded then."""
    for sample in outcome.samples:
        sample.reward = None
        if sample.metadata.pop("reward_error", None) is not None:
            sample.remove_sample = False
    return Outcome(outcome.samples, [], ABORTED)


def begin_sample(drawn: Sample, attempt: int) -> Sample:
    """A sample to generate into; the logged one stays as it is."""
    sample = copy.copy(drawn)
    sample.spec_info, sample.prefix_cache_info = (
        replace(drawn.spec_info),
        replace(drawn.prefix_cache_info),
    )
    sample.tokens = list(drawn.tokens)
    sample.spans = list(drawn.spans)
    sample.metadata = copy.deepcopy(drawn.metadata)
    sample.prompt = copy.deepcopy(drawn.prompt)
    sample.attempt = attempt
    return sample
