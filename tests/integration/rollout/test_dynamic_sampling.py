"""Filters, over-sampling and partial rollout on a real engine: what ends first changes nothing,
and what was begun is never lost."""

import asyncio
from typing import Any

import pytest

from slime_core.store.seal import adopt
from tests.integration.rollout.places import Place

FILTER = {
    "dynamic_sampling_filter_path": "check_reward_nonzero_std",
    "over_sampling_batch_size": 8,
    "rm_type": "exact_match",
}
PARTIAL = {"partial_rollout": True, "over_sampling_batch_size": 8, "rollout_max_response_len": 24}


def verdicts(seal: Any) -> dict[int, str]:
    return {group.entry.group_id: group.entry.verdict for group in seal.groups}


async def delayed(worker: Any, monkeypatch: Any, late: set[int]) -> None:
    """Makes some groups end only after all others."""
    plain, others = worker._maker.finish, asyncio.Event()

    async def finish(runtime: Any, samples: Any, segment: int) -> Any:
        outcome = await plain(runtime, samples, segment)
        if samples[0].group_index in late:
            await asyncio.wait({asyncio.ensure_future(others.wait())}, timeout=2.0)
        elif samples[0].group_index >= 6:
            others.set()
        return outcome

    monkeypatch.setattr(worker._maker, "finish", finish)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory, url) -> tuple[str, dict[int, str]]:
    place = Place(tmp_path_factory.mktemp("wanted"), url, **FILTER)

    async def body() -> Any:
        return await place.segment(await place.ready(), 0)

    seal = asyncio.run(body())
    return seal.digest, verdicts(seal)


def test_a_filter_keeps_groups_with_something_to_learn(tmp_path, url, wanted):
    place = Place(tmp_path, url, **FILTER)

    async def body() -> None:
        seal = await place.segment(await place.ready(), 0)
        assert seal.digest == wanted[0]
        kept = 0
        for (_, verdict), samples in place.rows(seal).items():
            spread = len({sample.reward for sample in samples}) > 1
            assert spread == (verdict == "kept")
            kept += verdict == "kept"
        assert kept == 4
        reasons = {g.entry.reason for g in seal.groups if g.entry.verdict == "dropped"}
        assert reasons <= {"dynamic_filter/zero_std_0.0", "dynamic_filter/zero_std_1.0"}
        back = [group for group, _ in seal.returned]
        assert sorted([*verdicts(seal), *back]) == list(range(seal.draws[1]))

    asyncio.run(body())


def test_which_group_ends_first_does_not_change_the_segment(tmp_path, url, wanted, monkeypatch):
    place = Place(tmp_path, url, **FILTER)

    async def body() -> None:
        worker = await place.ready()
        await delayed(worker, monkeypatch, {0, 1})
        assert (await place.segment(worker, 0)).digest == wanted[0]

    asyncio.run(body())


def test_killed_in_mid_over_sampling_the_next_owner_ends_at_the_same_segment(
    tmp_path, url, wanted, monkeypatch
):
    place = Place(tmp_path, url, **FILTER)

    async def body() -> None:
        first = await place.ready(0)
        await first.sample(0, 0)
        plain = first._maker.finish

        async def finish(runtime: Any, samples: Any, segment: int) -> Any:
            if samples[0].group_index in (0, 3):
                await asyncio.Event().wait()
            return await plain(runtime, samples, segment)

        monkeypatch.setattr(first._maker, "finish", finish)
        task = asyncio.create_task(first.generate(0, 0))
        while len(adopt(place.cache, 0).groups) < 3:
            assert not task.done()
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        before = set(adopt(place.cache, 0).finished)
        assert before and not before & {0, 3}
        second = await place.ready(1)
        assert (await place.segment(second, 0, epoch=1)).digest == wanted[0]
        assert adopt(place.cache, 0).doubles == 0

    asyncio.run(body())


def test_a_draw_that_was_not_needed_is_the_first_of_the_next_segment(tmp_path, url):
    place = Place(tmp_path, url, **FILTER | {"over_sampling_batch_size": 16})

    async def body() -> None:
        worker = await place.ready()
        first, second = [await place.segment(worker, k) for k in (0, 1)]
        back = [group for group, _ in first.returned]
        assert back and second.draws[0] == back[0]
        assert set(back) <= set(verdicts(second)) | {group for group, _ in second.returned}
        assert not set(verdicts(first)) & set(verdicts(second)), "each ends once"

    asyncio.run(body())


def test_spare_groups_end_a_segment_that_filters_would_leave_open(tmp_path, url):
    fallback = "check_reward_nonzero_std_with_fallback"
    options = FILTER | {"dynamic_sampling_filter_path": fallback, "rm_type": "gsm8k"}
    place = Place(tmp_path, url, **options)

    async def body() -> None:
        worker = await place.ready()

        async def nothing(samples: Any, given: Any = None) -> Any:
            for sample in samples:
                sample.reward = 0.0
            return type("S", (), {"graders": ["g"] * len(samples), "drop": None})()

        worker._maker._scorer.score = nothing
        seal = await place.segment(worker, 0)
        assert set(verdicts(seal).values()) == {"spare"} and seal.draws == (0, 8)

    asyncio.run(body())


async def until_partial(place: Place, worker: Any, monkeypatch: Any) -> Any:
    """A segment 0 in which groups 4 to 7 are still generating when the target is reached."""
    plain = worker._maker.finish
    held = asyncio.Event()

    async def finish(runtime: Any, samples: Any, segment: int) -> Any:
        if samples[0].group_index < 4 or segment:
            return await plain(runtime, samples, segment)
        params = dict(runtime.sampling.params, ignore_eos=True)
        runtime.sampling = type(runtime.sampling)(240, params, 60.0)
        held.set()
        return await plain(runtime, samples, segment)

    monkeypatch.setattr(worker._maker, "finish", finish)
    return await place.segment(worker, 0)


def hold_the_fresh(worker: Any, begun: set[int], monkeypatch: Any) -> None:
    """Keeps groups that begin here from ending before those that go on: the first to end are kept,
    and which those are would otherwise depend on the machine."""
    plain, waited_for, ended = worker._maker.finish, set(begun), asyncio.Event()

    async def finish(runtime: Any, samples: Any, segment: int) -> Any:
        outcome = await plain(runtime, samples, segment)
        waited_for.discard(samples[0].group_index)
        if not waited_for:
            ended.set()
        if samples[0].group_index not in begun:
            await asyncio.wait_for(ended.wait(), 60.0)
        return outcome

    monkeypatch.setattr(worker._maker, "finish", finish)


def test_what_was_begun_goes_on_in_the_next_segment_from_its_tokens(tmp_path, url, monkeypatch):
    options = PARTIAL | {"mask_offpolicy_in_partial_rollout": True, "failed_samples": "train"}
    place = Place(tmp_path, url, **options)

    async def body() -> None:
        first = await until_partial(place, await place.ready(), monkeypatch)
        found = verdicts(first)
        assert [g for g, v in found.items() if v == "kept"] == [0, 1, 2, 3]
        assert [g for g, _ in first.returned] == [4, 5, 6, 7]
        rows = place.rows(first)
        prefixes = {g: rows[g, "aborted"] for g, v in found.items() if v == "aborted"}
        assert prefixes, "nothing was under way"
        place.overrides["rollout_max_response_len"] = 245
        second_worker = await place.ready(1)  # another process: the prefix comes from the store
        hold_the_fresh(second_worker, set(prefixes), monkeypatch)
        second = await place.segment(second_worker, 1, epoch=1)
        after = place.rows(second)
        went_on = 0
        for group, before in prefixes.items():
            for old, new in zip(before, after[group, "kept"], strict=True):
                went_on += 1
                assert new.tokens[: len(old.tokens)] == old.tokens
                assert new.rollout_log_probs[: old.response_length] == old.rollout_log_probs
                assert new.loss_mask == [0] * old.response_length + [1] * (
                    new.response_length - old.response_length
                )
                assert sum(span.length for span in new.spans) == new.response_length
        assert went_on

    asyncio.run(body())
