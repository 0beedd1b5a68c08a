"""A rollout worker on a real engine and a real store: the same segment whatever interrupted it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.loading import load_config
from slime_core.errors import DigestError, EngineError, RewardError, StaleOwnerError
from slime_core.rewards.result import ScoreFailure
from slime_core.rollout.segment import SegmentLoop
from slime_core.rollout.settings import EvalJob, RolloutSettings
from slime_core.rollout.worker import RolloutWorker
from slime_core.run.epoch import Lease
from slime_core.store.backend import open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.documents import read_document
from slime_core.store.parts import list_parts
from slime_core.store.seal import adopt, read_seal
from tests.integration.rollout.places import close_at_the_end

GROUPS = 6
OVERRIDES = {
    "num_rollout": 2,
    "rollout_batch_size": GROUPS,
    "n_samples_per_prompt": 4,
    "eval_config": {
        "defaults": {"path": "configs/quickstart/heldout.jsonl@[0:20]"},
        "datasets": [{"name": "greedy", "temperature": 0.0}],
    },
    "store_fsync": False,
}


class Place:
    """A store and the workers that come and go at it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.backend = open_backend(str(folder / "store" / "r"))
        self._url = url
        self._closing: list[asyncio.Task[None]] = []

    def worker(self) -> RolloutWorker:
        config = load_config("configs/quickstart.yaml", OVERRIDES)
        return RolloutWorker(
            RolloutSettings(config, "r", str(self.folder / "store"), self.folder, self.folder / "l")
        )

    async def ready(self, epoch: int) -> RolloutWorker:
        """A new owner's worker, with its gate open."""
        worker = self.worker()
        await worker.setup()
        self._closing.append(close_at_the_end(worker))
        await worker.fence(epoch)
        await worker.set_engines([self._url])
        await worker.open_gate()
        return worker

    async def undisturbed(self) -> str:
        worker = await self.ready(0)
        await worker.sample(0, 0)
        return (await worker.generate(0, 0)).digest


@pytest.fixture
def play(tmp_path: Path, url: str) -> Callable[[Callable[[Place], Awaitable[Any]]], Any]:
    return lambda scenario: asyncio.run(scenario(Place(tmp_path, url)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory, url) -> str:
    """Digest of the seal of segment 0 when nothing goes wrong."""
    return asyncio.run(Place(tmp_path_factory.mktemp("wanted"), url).undisturbed())


def test_a_segment_is_drawn_generated_and_sealed_once(play, wanted):
    async def scenario(place: Place) -> None:
        worker = await place.ready(0)
        draws = await worker.sample(0, 0)
        assert (draws.uri, draws.rows, draws.from_store) == ("draws/000000.arrow", 24, False)
        assert (await worker.sample(0, 0)).from_store
        seal = await worker.generate(0, 0)
        assert (seal.rows, seal.digest, seal.from_store) == (24, wanted, False)
        assert (await worker.generate(0, 0)).from_store
        following = await worker.sample(0, 1)
        assert following.uri == "draws/000001.arrow"
        second = await worker.generate(0, 1)
        stored = read_seal(place.backend, 1)
        assert stored is not None and stored.parent == seal.digest
        assert stored.draws == (GROUPS, 2 * GROUPS) and second.digest != seal.digest

    play(scenario)


async def interrupted(place: Place, monkeypatch) -> None:
    """An owner that stored some groups of segment 0 and then ended."""
    worker = await place.ready(0)
    await worker.sample(0, 0)
    plain = worker._maker.finish

    async def finish(runtime: Any, samples: Any, segment: int) -> Any:
        if samples[0].group_index >= 3:
            await asyncio.Event().wait()
        return await plain(runtime, samples, segment)

    monkeypatch.setattr(worker._maker, "finish", finish)
    task = asyncio.create_task(worker.generate(0, 0))
    while len(adopt(NodeCache(place.backend), 0).groups) < 3:
        assert not task.done()
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_new_owner_adopts_what_is_stored_and_ends_at_the_same_segment(play, wanted, monkeypatch):
    async def scenario(place: Place) -> None:
        await interrupted(place, monkeypatch)
        before, _ = list_parts(NodeCache(place.backend), 0)
        second = await place.ready(1)
        assert (await second.sample(1, 0)).from_store
        assert (await second.generate(1, 0)).digest == wanted
        found = adopt(NodeCache(place.backend), 0)
        assert found.doubles == 0 and len(found.kept) == GROUPS
        after = {file.part.key for file in list_parts(NodeCache(place.backend), 0)[0]}
        assert {file.part.key for file in before} < after

    play(scenario)


def test_groups_of_a_damaged_part_are_generated_again_to_the_same_rows(play, wanted, monkeypatch):
    async def scenario(place: Place) -> None:
        await interrupted(place, monkeypatch)
        victim = list_parts(NodeCache(place.backend), 0)[0][0].part
        path = place.backend.local_path(victim.key)
        assert path is not None
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        second = await place.ready(1)
        await second.sample(1, 0)
        assert (await second.generate(1, 0)).digest == wanted
        assert place.backend.get(f"quarantine/{victim.key}") == bytes(data)
        by = read_document(place.backend, "groups/000000/seal.json").by
        assert victim.key not in [part[0] for part in by["parts"]]

    play(scenario)


def test_a_segment_that_cannot_be_read_back_is_not_sealed(play, monkeypatch):
    async def scenario(place: Place) -> None:
        worker = await place.ready(0)
        await worker.sample(0, 0)

        async def does_nothing(*_: object) -> None:
            return

        monkeypatch.setattr(SegmentLoop, "run", does_nothing)
        with pytest.raises(DigestError, match="only 0 of 6 kept groups of segment 0 can be read"):
            await worker.generate(0, 0)
        assert read_seal(place.backend, 0) is None

    play(scenario)


def test_an_owner_that_was_followed_cannot_seal(play):
    async def scenario(place: Place) -> None:
        worker = await place.ready(0)
        await worker.sample(0, 0)
        for expected in (0, 1):  # the second owner comes after the first has ended
            with Lease.acquire(place.backend) as lease:
                assert lease.epoch == expected
        with pytest.raises(StaleOwnerError, match="epoch 1 owns the run now"):
            await worker.generate(0, 0)
        assert read_seal(place.backend, 0) is None

    play(scenario)


def test_a_worker_follows_the_highest_epoch_it_has_heard_of(play):
    async def scenario(place: Place) -> None:
        worker = await place.ready(4)
        with pytest.raises(StaleOwnerError, match="epoch 3 is over; this worker follows 4"):
            await worker.sample(3, 0)
        with pytest.raises(StaleOwnerError):
            await worker.fence(3)

    play(scenario)


def test_an_evaluation_is_stored_once_for_the_version_that_answered(play):
    async def scenario(place: Place) -> None:
        worker = await place.ready(0)
        result = await worker.evaluate(0, EvalJob(1, "l0-1", "greedy"))
        assert (result.uri, result.rows, result.from_store) == ("evals/l0-1/greedy.json", 20, False)
        body = read_document(place.backend, result.uri).body
        metrics = body["metrics"]
        assert (body["version"], body["iteration"], metrics["samples"]) == ("l0-1", 1, 20.0)
        assert metrics["reward"] == metrics["pass@1"] and 0 < metrics["reward"] < 1
        assert (await worker.evaluate(0, EvalJob(1, "l0-1", "greedy"))).from_store
        with pytest.raises(EngineError, match=r"of l0-2 was answered by \['l0-1'\]"):
            await worker.evaluate(0, EvalJob(2, "l0-2", "greedy"))

    play(scenario)


def test_answers_that_cannot_be_graded_are_counted_and_never_a_zero(play, monkeypatch):
    async def scenario(place: Place) -> None:
        worker = await place.ready(0)
        whole = await worker.evaluate(0, EvalJob(1, "l0-1", "greedy"))
        plain = worker._hub.score_group

        async def fails(samples: Any, **options: Any) -> Any:
            results = await plain(samples, **options)
            return [ScoreFailure("timeout", "took more than 1 s", ""), *results[1:]]

        monkeypatch.setattr(worker._hub, "score_group", fails)
        place.backend.delete(whole.uri)
        partly = await worker.evaluate(0, EvalJob(1, "l0-1", "greedy"))
        metrics = read_document(place.backend, partly.uri).body["metrics"]
        assert (metrics["grader_failures"], metrics["samples"]) == (1.0, 19.0)

        async def none(samples: Any, **options: Any) -> Any:
            return [ScoreFailure("timeout", "took more than 1 s", "")] * len(samples)

        monkeypatch.setattr(worker._hub, "score_group", none)
        place.backend.delete(partly.uri)
        with pytest.raises(RewardError, match="no prompt could be graded: timeout: took more"):
            await worker.evaluate(0, EvalJob(1, "l0-1", "greedy"))

    play(scenario)
