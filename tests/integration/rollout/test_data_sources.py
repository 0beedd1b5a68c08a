"""Data sources and buffers of one's own on a real engine: what they chose outlives a kill."""

import asyncio
from typing import Any

import pytest

from slime_core.errors import PluginError
from slime_core.rollout.returned import read_choice
from tests.integration.rollout.places import Place

MANY = {
    "dynamic_sampling_filter_path": "check_reward_nonzero_std",
    "over_sampling_batch_size": 16,
}
FEW = MANY | {"over_sampling_batch_size": 4}

FILTERS = """
import random

def newest(args, rollout_id, buffer, num_samples):
    assert rollout_id is None and all(len(group) == 4 for group in buffer)
    return buffer[-num_samples:]

def by_chance(args, rollout_id, buffer, num_samples):
    return random.SystemRandom().sample(buffer, min(3, len(buffer)))

def only_two(args, buffer, num_samples):
    kept = buffer[:2]
    buffer.clear()
    return kept
"""

SOURCES = """
from slime.data import RolloutDataSourceWithBuffer as Flat
from slime.rollout.data_source import RolloutDataSourceWithBuffer

class Marked(RolloutDataSourceWithBuffer):
    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.metadata["source"] = "mine"
        return groups

class Best(Flat):
    def buffer_filter(self, args, buffer, num_samples):
        assert num_samples % 4 == 0
        return sorted(buffer, key=lambda x: (x.reward, x.group_index), reverse=True)[:num_samples]

class Own(RolloutDataSourceWithBuffer):
    '''Keeps what came back itself, and serves it from its other end, one at a time.'''
    def add_samples(self, groups):
        self.buffer += groups

    def get_samples(self, num_samples):
        again = [self.buffer.pop()] if self.buffer else []
        return again + super().get_samples(num_samples - len(again))
"""


def place_of(folder: Any, url: str, text: str, **options: Any) -> Place:
    (folder / "plugin.py").write_text(text)
    plugin = str(folder / "plugin.py")
    return Place(folder, url, **{
        name: value.replace("PLUGIN", plugin) if isinstance(value, str) else value
        for name, value in options.items()
    })  # fmt: skip


async def returned_after_first(place: Place) -> tuple[Any, list[int]]:
    """A first segment that begins 16 prompts; then the settings begin 4."""
    worker = await place.ready()
    seal = await place.segment(worker, 0)
    back = [group for group, _ in seal.returned]
    assert len(back) > 5
    place.overrides.update(FEW)
    return worker, back


def test_a_buffer_filter_chooses_what_begins_and_the_rest_waits(tmp_path, url):
    place = place_of(tmp_path, url, FILTERS, buffer_filter_path="PLUGIN:newest", **MANY)

    async def body() -> None:
        _, back = await returned_after_first(place)
        second = await place.segment(await place.ready(1), 1, epoch=1)
        ended = {group.entry.group_id for group in second.groups}
        assert set(back[-4:]) <= ended | {g for g, _ in second.returned}
        assert set(back[:-4]) <= {g for g, _ in second.returned}, "what waits is not lost"
        third = await place.segment(await place.ready(2), 2, epoch=2)
        choice = read_choice(place.backend, 2, second)
        assert choice is not None
        assert [g for g, _ in choice.begun] == [g for g, _ in second.returned][-4:]
        assert not {g.entry.group_id for g in third.groups} & ended

    asyncio.run(body())


def test_a_choice_by_chance_is_made_once(tmp_path, url):
    place = place_of(tmp_path, url, FILTERS, buffer_filter_path="PLUGIN:by_chance", **MANY)

    async def body() -> None:
        _, back = await returned_after_first(place)
        await (await place.ready(1)).sample(1, 1)  # and is killed here
        choice = read_choice(place.backend, 1, place.seal(0))
        assert choice is not None and len(choice.begun) == 3
        resumed = await place.ready(2)
        ref = await resumed.sample(2, 1)
        assert read_choice(place.backend, 1, place.seal(0)) == choice and ref.from_store
        assert [d.group_id for d in resumed._draws.of_segment(1)] == [16], "one beside the three"
        second = await place.segment(resumed, 1, epoch=2)
        assert {g for g, _ in choice.waiting} <= {g for g, _ in second.returned}
        assert {g for g, _ in choice.waiting} == set(back) - {g for g, _ in choice.begun}

    asyncio.run(body())


def test_what_a_filter_takes_out_and_does_not_return_is_given_up(tmp_path, url):
    place = place_of(tmp_path, url, FILTERS, buffer_filter_path="PLUGIN:only_two", **MANY)

    async def body() -> None:
        _, back = await returned_after_first(place)
        second = await place.segment(await place.ready(1), 1, epoch=1)
        choice = read_choice(place.backend, 1, place.seal(0))
        assert choice is not None
        assert [g for g, _ in choice.dropped] == back[2:] and not choice.waiting
        assert not set(back[2:]) & {g for g, _ in second.returned}

    asyncio.run(body())


@pytest.mark.parametrize("name", ["fifo", "prioritized", "stratified", "diversity", "quality"])
def test_ready_filters_serve_what_came_back(tmp_path, url, name):
    place = Place(tmp_path, url, buffer_filter_path=name, **MANY)

    async def body() -> None:
        _, back = await returned_after_first(place)
        await (await place.ready(1)).sample(1, 1)
        choice = read_choice(place.backend, 1, place.seal(0))
        assert choice is not None and [g for g, _ in choice.begun] == back[:4]

    asyncio.run(body())


def test_a_source_of_ones_own_feeds_a_segment(tmp_path, url):
    place = place_of(tmp_path, url, SOURCES, data_source_path="PLUGIN:Marked")

    async def body() -> None:
        first = await place.segment(await place.ready(), 0)
        second = await place.segment(await place.ready(1), 1, epoch=1)
        rows = [s for seal in (first, second) for rows in place.rows(seal).values() for s in rows]
        assert all(sample.metadata["source"] == "mine" for sample in rows)
        prompts = {sample.group_index: sample.prompt for sample in rows}
        plain = Place(tmp_path / "plain", url)
        worker = await plain.ready()
        ours = [await plain.segment(worker, k) for k in (0, 1)]
        assert prompts == {
            s.group_index: s.prompt for seal in ours for r in plain.rows(seal).values() for s in r
        }

    asyncio.run(body())


def test_the_method_of_a_source_chooses_before_any_path(tmp_path, url):
    options = MANY | {"buffer_filter_path": "fifo"}
    place = place_of(tmp_path, url, SOURCES, data_source_path="PLUGIN:Best", **options)

    async def body() -> None:
        _, back = await returned_after_first(place)
        await (await place.ready(1)).sample(1, 1)
        choice = read_choice(place.backend, 1, place.seal(0))
        assert choice is not None and [g for g, _ in choice.begun] == back[:-5:-1]

    asyncio.run(body())


@pytest.mark.parametrize("killed", [False, True])
def test_a_source_with_a_buffer_of_its_own_serves_what_came_back(tmp_path, url, killed):
    place = place_of(tmp_path, url, SOURCES, data_source_path="PLUGIN:Own", **MANY)

    async def body() -> None:
        worker, back = await returned_after_first(place)
        worker = await place.ready(1)
        second = await place.segment(worker, 1, epoch=1)
        choice = read_choice(place.backend, 1, place.seal(0))
        assert choice is not None and [g for g, _ in choice.begun] == [back[-1]]
        waiting = {g for g, _ in choice.waiting}
        assert waiting == set(back[:-1])
        worker = await place.ready(2) if killed else worker
        epoch = 2 if killed else 1
        await worker.sample(epoch, 2)
        later = read_choice(place.backend, 2, second)
        assert later is not None and len(later.begun) == 1
        assert later.begun[0][0] in waiting | {g for g, _ in second.returned}

    asyncio.run(body())


def test_a_filter_that_fails_says_so(tmp_path, url):
    text = "def broken(args, rollout_id, buffer, num_samples):\n    return buffer[0].reward"
    place = place_of(tmp_path, url, text, buffer_filter_path="PLUGIN:broken", **MANY)

    async def body() -> None:
        await returned_after_first(place)
        with pytest.raises(PluginError, match="buffer filter raised AttributeError"):
            await (await place.ready(1)).sample(1, 1)

    asyncio.run(body())
