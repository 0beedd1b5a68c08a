"""Dumps of samples: written by one run, trained by another, and never a program."""

import asyncio
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_core.errors import DataError, PluginError
from slime_core.rollout.dumps import read_dump, write_dump
from slime_core.store.parts import KEPT
from tests.integration.rollout.places import Place
from tests.unit.store.builders import finished_sample

NOWHERE = "http://127.0.0.1:9"  # no engine: nothing may be asked


def segments(place: Place, *numbers: int) -> list:
    async def body() -> list:
        return [await place.segment(await place.ready(k), k, epoch=k) for k in numbers]

    return asyncio.run(body())


def content(place: Place, seal) -> list:
    return [
        (s.prompt, s.tokens, s.response, s.reward, s.rollout_log_probs, s.label, s.metadata)
        for (_, verdict), group in sorted(place.rows(seal).items())
        if verdict == KEPT
        for s in group
    ]


@pytest.fixture
def dumped(tmp_path: Path, url: str) -> tuple[Place, str]:
    template = str(tmp_path / "dumps" / "{rollout_id}.pt")
    place = Place(tmp_path / "a", url, save_debug_rollout_data=template)
    segments(place, 0, 1)
    return place, template


def test_samples_of_one_run_are_trained_by_another(tmp_path: Path, dumped: tuple[Place, str]):
    first, template = dumped
    whole = torch.load(template.format(rollout_id=1), weights_only=True)
    assert whole["rollout_id"] == 1 and len(whole["samples"]) == 16
    assert {type(sample["status"]) for sample in whole["samples"]} == {str}
    second = Place(tmp_path / "b", NOWHERE, load_debug_rollout_data=template)
    for made, read in zip((0, 1), segments(second, 0, 1), strict=True):
        assert content(second, read) == content(first, first.seal(made))
        ids = [group.entry.group_id for group in read.groups]
        assert ids == list(range(4 * made, 4 * made + 4))
        assert None not in second.graders(read)


def test_an_owner_that_ended_while_it_stored_a_dump_is_followed_by_one_that_ends_it(
    tmp_path: Path, dumped: tuple[Place, str], monkeypatch: pytest.MonkeyPatch
):
    first, template = dumped
    second = Place(tmp_path / "b", NOWHERE, load_debug_rollout_data=template)

    async def ended_after_two() -> None:
        worker = await second.ready()
        stored = []

        async def put(writer, group) -> None:
            stored.append(group)
            if len(stored) > 2:
                raise PluginError("ended here")
            await true_put(writer, group)

        from slime_core.rollout.part_writer import PartWriter

        true_put = PartWriter.put
        with monkeypatch.context() as patched, pytest.raises(PluginError, match="ended here"):
            patched.setattr(PartWriter, "put", put)
            await second.segment(worker, 0)

    asyncio.run(ended_after_two())

    async def another() -> None:
        await second.segment(await second.ready(1), 0, epoch=1)

    asyncio.run(another())
    assert content(second, second.seal(0)) == content(first, first.seal(0))
    assert [group.entry.group_id for group in second.seal(0).groups] == [0, 1, 2, 3]


def test_a_dump_that_is_missing_or_has_another_size_is_a_sentence(
    tmp_path: Path, dumped: tuple[Place, str]
):
    _, template = dumped
    with pytest.raises(DataError, match=r"7\.pt is not there: iteration 7 needs it"):
        read_dump(template, 7)
    small = Place(tmp_path / "b", NOWHERE, load_debug_rollout_data=template, rollout_batch_size=2)
    with pytest.raises(PluginError, match="returned 4 groups, rollout_batch_size is 2"):
        segments(small, 0)


def test_arrays_and_unknown_attributes_survive(tmp_path: Path):
    sample = finished_sample(3)
    sample.rollout_routed_experts = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    sample.own = {"nested": [1, 2.5, None]}  # type: ignore[attr-defined]
    write_dump(str(tmp_path / "{rollout_id}.pt"), 5, [sample])
    (read,) = read_dump(str(tmp_path / "{rollout_id}.pt"), 5)
    assert (read.rollout_routed_experts == sample.rollout_routed_experts).all()
    assert read.own == sample.own  # type: ignore[attr-defined]
    read.rollout_routed_experts = sample.rollout_routed_experts = None
    assert read == sample


class Program:
    """Would run on being read by a plain unpickler."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('it ran')",))


def test_nothing_in_a_dump_runs(tmp_path: Path):
    template = str(tmp_path / "{rollout_id}.pt")
    torch.save({"rollout_id": 0, "samples": [Program()]}, template.format(rollout_id=0))
    Path(template.format(rollout_id=1)).write_bytes(pickle.dumps(Program()))
    Path(template.format(rollout_id=2)).write_bytes(b"no dump")
    torch.save({"other": 1}, template.format(rollout_id=3))
    for number in range(4):
        with pytest.raises(DataError, match="is no dump of samples that is safe to read"):
            read_dump(template, number)
