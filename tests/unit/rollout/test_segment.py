"""A segment: every draw ends once and what finished is stored, restarts or not."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_core.engines.client import EngineAnswerError
from slime_core.errors import EngineError, RewardError, StoreError
from slime_core.rollout.outcome import Outcome, dropped
from slime_core.rollout.part_writer import PartTarget, PartWriter
from slime_core.rollout.segment import (
    FURTHER_DRAWS_PER_GROUP,
    SegmentLoop,
    SegmentPlan,
    SegmentWork,
)
from slime_core.sample import Sample, Status
from slime_core.store.backend import Backend, open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.draws import Draw
from slime_core.store.seal import Segment, adopt, open_groups
from tests.unit.store.builders import draw, finished_sample

TARGET = 4
Finish = Callable[[list[Sample]], Any]


class Rollout:
    """A segment loop on a real store; how groups finish is up to each test."""

    def __init__(
        self,
        backend: Backend,
        finish: Finish,
        epoch: int = 0,
        attempts: int = 3,
        partial: bool = False,
    ) -> None:
        self.partial = partial
        self.prefixes: dict[int, Any] = {}
        self.backend = backend
        self.finish = finish
        self.epoch = epoch
        self.attempts = attempts
        self.tasks_left = self.aborts = 0
        self.further_calls: list[int] = []
        self.begun: Counter[tuple[int, int]] = Counter()
        self.logged = [draw(group) for group in range(TARGET)]

    def further(self, count: int) -> list[Draw]:
        self.further_calls.append(count)
        first = self.logged[-1].group_id + 1
        self.logged += (new := [draw(first + i) for i in range(count)])
        return new

    async def _finish(self, samples: list[Sample], stopping: Callable[[], bool]) -> Outcome:
        self.begun[samples[0].group_index or 0, samples[0].attempt] += 1
        await asyncio.sleep(0)
        self.finish(samples)
        for sample in samples:
            done = finished_sample(sample.group_index or 0, (sample.index or 0) % 4)
            sample.append_response_tokens(
                tokens=done.tokens[3:], log_probs=done.rollout_log_probs,
                meta_info={"finish_reason": {"type": "stop"}, "weight_version": "a-0"},
            )  # fmt: skip
            sample.reward = 1.0
        return Outcome(samples, ["grader"] * len(samples))

    async def _abort(self) -> None:
        self.aborts += 1

    def run(self) -> Segment:
        async def body() -> None:
            target = PartTarget(self.backend, NodeCache(self.backend), 0, self.epoch, 99)
            counter = itertools.count()
            writer = PartWriter(target, lambda: next(counter))
            plan = SegmentPlan(0, TARGET, self.attempts, partial=self.partial)
            work = SegmentWork(self._finish, self.further, self._abort)
            loop = SegmentLoop(plan, work, writer)
            try:
                adopted = adopt(NodeCache(self.backend), 0)
                await loop.run(self.logged, adopted, self.prefixes)
            finally:
                await writer.close()
                self.tasks_left = len(asyncio.all_tasks()) - 1

        asyncio.run(body())
        return self.stored()

    def stored(self) -> Segment:
        return adopt(NodeCache(self.backend), 0)


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return open_backend(str(tmp_path))


def counted(segment: Segment) -> Counter[str]:
    return Counter(group.entry.verdict for group in segment.groups)


def all_fine(samples: list[Sample]) -> None:
    return


def failing(*attempts: tuple[int, int]) -> Finish:
    """Fails the named (group, attempt) pairs."""

    def finish(samples: list[Sample]) -> None:
        if (samples[0].group_index, samples[0].attempt) in attempts:
            raise RewardError("the grader is away")

    return finish


def test_every_draw_is_kept_once_and_each_group_stored_whole(backend):
    rollout = Rollout(backend, all_fine)
    segment = rollout.run()
    assert sorted(g.entry.group_id for g in segment.kept) == [0, 1, 2, 3]
    assert counted(segment) == {"kept": 4} and segment.doubles == 0
    assert all(group.entry.rows == 4 for group in segment.groups)
    assert rollout.further_calls == []


def test_a_failed_attempt_is_stored_with_its_reason_and_begun_again(backend):
    rollout = Rollout(backend, failing((1, 0), (1, 1)))
    segment = rollout.run()
    assert counted(segment) == {"kept": 4, "failed": 2}
    failed = [g.entry for g in segment.groups if g.entry.verdict == "failed"]
    assert [(e.group_id, e.attempt, e.reason) for e in failed] == [
        (1, 0, "RewardError"),
        (1, 1, "RewardError"),
    ]
    assert segment.finished[1].entry.attempt == 2
    assert rollout.begun[1, 0] == rollout.begun[1, 1] == rollout.begun[1, 2] == 1


def test_a_group_that_never_succeeds_is_dropped_and_replaced(backend):
    rollout = Rollout(backend, failing(*((2, attempt) for attempt in range(3))))
    segment = rollout.run()
    assert counted(segment) == {"kept": 4, "failed": 2, "dropped": 1}
    assert rollout.further_calls == [1]
    assert sorted(g.entry.group_id for g in segment.kept) == [0, 1, 3, 4]
    assert segment.finished[2].entry.verdict == "dropped"


def test_drops_without_end_are_bounded_and_the_reason_is_named(backend):
    def finish(samples: list[Sample]) -> None:
        raise EngineError("prompt too long")

    rollout = Rollout(backend, finish, attempts=1)
    with pytest.raises(RewardError, match=r"only 0 of 4 .*EngineError: prompt too long"):
        rollout.run()
    assert sum(rollout.further_calls) == FURTHER_DRAWS_PER_GROUP * TARGET
    assert counted(rollout.stored()) == {"dropped": (1 + FURTHER_DRAWS_PER_GROUP) * TARGET}


def test_what_the_grader_said_is_told_where_nothing_can_be_graded(backend):
    class Ungraded(Rollout):
        async def _finish(self, samples: list[Sample], stopping: Callable[[], bool]) -> Outcome:
            rows = (await super()._finish(samples, stopping)).samples
            error = {"reason": "exception", "message": "mine.py:r raised ValueError: my bug"}
            rows[1].metadata = {"reward_error": error}
            return dropped(rows, [], "reward_error/exception")

    rollout = Ungraded(backend, all_fine)
    with pytest.raises(RewardError, match=r"\d+ times: mine\.py:r raised ValueError: my bug"):
        rollout.run()


def test_a_restart_goes_on_with_the_groups_that_are_missing(backend):
    first = Rollout(backend, all_fine)

    def dies_at_group_3(samples: list[Sample]) -> None:
        if samples[0].group_index == 3:
            raise MemoryError("killed here")

    first.finish = dies_at_group_3
    with pytest.raises(MemoryError):
        first.run()
    stored = {g.entry.group_id: g.entry.digest for g in first.stored().groups}
    assert 3 not in stored

    second = Rollout(backend, all_fine, epoch=1)
    segment = second.run()
    assert sorted(second.begun) == [(group, 0) for group in range(4) if group not in stored]
    assert sorted(g.entry.group_id for g in segment.kept) == [0, 1, 2, 3]
    assert segment.doubles == 0
    assert stored.items() <= {g.entry.group_id: g.entry.digest for g in segment.groups}.items()


def test_a_restart_raises_the_attempt_only_where_rows_of_it_are_stored(backend):
    first = Rollout(backend, failing((1, 0)))

    def dies_in_the_second_attempt(samples: list[Sample]) -> None:
        if samples[0].attempt == 1:
            raise MemoryError("killed here")
        failing((1, 0))(samples)

    first.finish = dies_in_the_second_attempt
    with pytest.raises(MemoryError):
        first.run()
    second = Rollout(backend, all_fine, epoch=1)
    segment = second.run()
    assert {attempt for group, attempt in second.begun if group == 1} == {1}
    assert {attempt for group, attempt in second.begun if group != 1} <= {0}
    assert segment.finished[1].entry.attempt == 1


def test_a_restart_draws_on_where_dropped_groups_are_not_replaced_yet(backend):
    first = Rollout(backend, failing((2, 0)), attempts=1)

    def dies(count: int) -> list[Draw]:
        raise MemoryError("killed before the log was written")

    first.further = dies  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        first.run()
    second = Rollout(backend, all_fine, epoch=1)
    segment = second.run()
    assert second.further_calls == [1] and sorted(second.begun) == [(4, 0)]
    assert len(segment.kept) == TARGET


def test_further_draws_that_were_logged_before_the_crash_are_done_first(backend):
    first = Rollout(backend, failing((2, 0)), attempts=1)
    first.logged = first.logged[:3]

    def none(count: int) -> list[Draw]:
        raise MemoryError("killed after the log was written")

    first.further = none  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        first.run()
    second = Rollout(backend, all_fine, epoch=1)  # its log holds groups 0 to 3
    second.logged.append(draw(4))
    segment = second.run()
    assert second.further_calls == [] and sorted(second.begun) == [(3, 0), (4, 0)]
    assert sorted(g.entry.group_id for g in segment.kept) == [0, 1, 3, 4]


def test_an_attempt_starts_from_the_draw_and_not_from_the_attempt_before(backend):
    """Neither counters nor nested metadata leak, else a restart would give other rows."""

    def spoils_the_first(samples: list[Sample]) -> None:
        for sample in samples:
            assert "nested" not in sample.metadata["box"], "from the attempt before"
            sample.metadata["box"]["nested"] = sample.attempt
            sample.append_response_tokens(
                tokens=[5], log_probs=[-1.0],
                meta_info={
                    "finish_reason": {"type": "stop"}, "weight_version": "a-0",
                    "cached_tokens": 7, "prompt_tokens": 9, "spec_verify_ct": 3,
                },
            )  # fmt: skip
        if samples[0].attempt == 0:
            raise RewardError("once")

    rollout = Rollout(backend, spoils_the_first)
    for one in rollout.logged:
        for sample in one.samples:
            sample.metadata["box"] = {}
    segment = rollout.run()
    assert counted(segment) == {"kept": 4, "failed": 4}
    files = open_groups(NodeCache(backend), segment.groups)
    for file, batch in files.values():
        for sample in file.rows(batch).to_samples():
            assert sample.metadata["box"] == {"nested": sample.attempt}
            assert sample.spec_info.spec_verify_ct == 3
            assert sample.prefix_cache_info.cached_tokens == 7


def test_a_store_that_refuses_a_part_ends_the_segment_and_every_group_in_it(backend, monkeypatch):
    rollout = Rollout(backend, all_fine)
    plain = rollout._finish

    async def finish(samples: list[Sample], stopping: Callable[[], bool]) -> Outcome:
        if samples[0].group_index:
            await asyncio.Event().wait()
        return await plain(samples, stopping)

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("no space left to write parts")

    rollout._finish = finish  # type: ignore[method-assign]
    monkeypatch.setattr("slime_core.rollout.part_writer.write_part", refuse)
    with pytest.raises(StoreError, match="no space left"):
        rollout.run()
    assert rollout.tasks_left == 0, "no group goes on behind a segment that has ended"
    assert rollout.aborts == 1, "nor does a request: the segment may be begun again at once"


def test_one_draw_that_is_already_finished_is_not_begun(backend):
    Rollout(backend, all_fine).run()
    again = Rollout(backend, all_fine, epoch=1)
    again.run()
    assert again.begun == Counter() and again.further_calls == []


def test_a_filter_that_drops_all_but_some_draws_one_more_at_a_time(backend):
    rollout = Rollout(backend, all_fine)
    plain = rollout._finish

    async def finish(samples: list[Sample], stopping: Callable[[], bool]) -> Outcome:
        outcome = await plain(samples, stopping)
        drop = (samples[0].group_index or 0) % 2
        return replace(outcome, verdict="dropped", reason="odd") if drop else outcome

    rollout._finish = finish  # type: ignore[method-assign]
    segment = rollout.run()
    assert sorted(g.entry.group_id for g in segment.kept) == [0, 2, 4, 6]
    assert rollout.further_calls == [1] * 3, "for 1, 3 and 5"


def test_partial_takes_as_many_as_are_needed_and_keeps_whole_ones_for_later(backend):
    rollout = Rollout(backend, all_fine, partial=True)
    rollout.logged += [draw(4), draw(5)]
    segment = rollout.run()
    assert counted(segment) == {"kept": 4, "aborted": 2}
    left = [g for g in segment.groups if g.entry.verdict == "aborted"]
    for file, batch in open_groups(NodeCache(backend), left).values():
        for sample in file.rows(batch).to_samples():
            assert sample.reward is None and sample.status is Status.COMPLETED


def test_what_goes_on_keeps_its_attempt_and_a_failure_begins_it_anew(backend):
    rollout = Rollout(backend, failing((1, 2)), attempts=4)
    begun = [finished_sample(1, i, length=2) for i in range(4)]
    for sample in begun:
        sample.attempt, sample.status, sample.reward = 2, Status.ABORTED, None
    rollout.prefixes = {1: begun}
    segment = rollout.run()
    assert [key for key in rollout.begun if key[0] == 1] == [(1, 2), (1, 3)]
    assert segment.finished[1].entry.attempt == 3
    assert [
        (e.attempt, e.reason) for g in segment.groups if (e := g.entry).verdict == "failed"
    ] == [(2, "RewardError")]


@pytest.mark.parametrize(("status", "attempts"), [(400, 1), (413, 1), (429, 3), (408, 3)])
def test_what_an_engine_refuses_is_not_asked_again(tmp_path, status, attempts):
    def finish(samples: list[Sample]) -> None:
        if samples[0].group_index == 1:
            raise EngineAnswerError("http://engine/generate", status, "the prompt is too long")

    rollout = Rollout(open_backend(str(tmp_path)), finish)
    segment = rollout.run()
    entry = segment.finished[1].entry
    assert (entry.verdict, entry.attempt) == ("dropped", attempts - 1)
    assert [rollout.begun[1, i] for i in range(3)] == [1] * attempts + [0] * (3 - attempts)


@pytest.mark.timeout(120)
def test_a_segment_that_has_enough_waits_for_no_group_that_is_still_made(backend, monkeypatch):
    """Its last part is written at once, though another group could still come."""
    monkeypatch.setattr("slime_core.rollout.part_writer.LINGER_S", 1e6)
    rollout = Rollout(backend, all_fine, partial=True)
    finish, aborted = rollout._finish, asyncio.Event()

    async def first_ends_last(samples: list[Sample], stopping: Callable[[], bool]) -> Outcome:
        if samples[0].group_index == 0:
            await aborted.wait()
        return await finish(samples, stopping)

    async def abort() -> None:
        aborted.set()

    rollout._finish, rollout._abort = first_ends_last, abort  # type: ignore[method-assign]
    rollout.further(1)
    assert sorted(group.entry.group_id for group in rollout.run().kept) == [1, 2, 3, 4]
