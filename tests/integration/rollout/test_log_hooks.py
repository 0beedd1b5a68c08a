"""Functions that are told of batches and evaluations: as they are stored, and without effect."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest

from slime_core.errors import DigestError, PluginError
from slime_core.rollout import log_hooks
from slime_core.rollout.settings import EvalJob
from tests.integration.rollout.places import Place

HELDOUT = "configs/quickstart/heldout.jsonl"
FILTER = {"dynamic_sampling_filter_path": "check_reward_nonzero_std", "rm_type": "exact_match"}
BATCH = """
import json

def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    said = {"id": rollout_id, "tokens": [s.tokens for s in samples], "s": rollout_time,
            "rewards": [s.reward for s in samples], "batch": args.rollout_batch_size}
    with open(FILE, "a") as file:
        print(json.dumps(said), file=file)
    for sample in samples:
        sample.reward = 99.0
    return True

def process(args, all_samples, data_source):
    with open(FILE, "a") as file:
        print(json.dumps([[g[0].group_index, len(g)] for g in all_samples]), file=file)

def evaluated(rollout_id, args, data, extra_metrics):
    [(name, found)] = data.items()
    with open(FILE, "a") as file:
        print(json.dumps([rollout_id, name, found["rewards"], found["truncated"],
                          [s.label for s in found["samples"]], extra_metrics]), file=file)

def too_few(rollout_id, args):
    pass
"""
FUNCTION = """
def extra(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    with open(FILE, "a") as file:
        print(json.dumps(rollout_extra_metrics), file=file)

def rollout(args, rollout_id, data_source, evaluation=False):
    from slime.rollout.base_types import RolloutFnTrainOutput
    from slime.rollout.sglang_rollout import generate_rollout
    output = generate_rollout(args, rollout_id, data_source)
    return RolloutFnTrainOutput(samples=output.samples, metrics={"mine": 7.0})
"""
BAD = {
    "raises": "def log(*given):\n    raise ValueError('no wandb here')\n",
    "exits": "import sys\ndef log(*given):\n    sys.exit(3)\n",
    "exits while awaited": "import sys\nasync def log(*given):\n    sys.exit(3)\n",
    "hangs": "import threading\ndef log(*given):\n    threading.Event().wait(60)\n",
}
WORDS = {
    "raises": "ValueError: no wandb here",
    "exits": "called sys.exit(3)",
    "exits while awaited": "called sys.exit(3)",
    "hangs": "waited 0 s for",
}


def file_of(folder: Path, content: str = BATCH) -> str:
    """A plug-in that writes to `told` beside it."""
    path = folder / "hooks.py"
    path.write_text(f"FILE = {str(folder / 'told')!r}\n{content}")
    return str(path)


def told(folder: Path) -> list:
    return [json.loads(line) for line in (folder / "told").read_text().splitlines()]


def test_a_batch_is_told_as_it_is_stored(tmp_path, url):
    place = Place(tmp_path, url, custom_rollout_log_function_path=f"{file_of(tmp_path)}:log")

    async def body() -> None:
        worker = await place.ready()
        stored = place.rows(await place.segment(worker, 0))
        samples = [one for _, rows in sorted(stored.items()) for one in rows]
        [said] = told(tmp_path)
        assert said["id"] == 0 and said["batch"] == 4 and said["s"] > 0
        assert said["tokens"] == [sample.tokens for sample in samples]
        assert said["rewards"] == [sample.reward for sample in samples]
        assert 99.0 not in said["rewards"], "what a function changes stays its own"
        resumed = await place.ready(1)
        await resumed.generate(1, 0)
        again = told(tmp_path)[1]
        assert (again["id"], again["rewards"]) == (0, said["rewards"])
        assert math.isnan(again["s"]), "nobody here knows how long it took"
        assert math.isnan(again["s"]), "nobody here knows how long it took"

    asyncio.run(body())


def test_all_groups_are_told_those_that_were_dropped_too(tmp_path, url):
    path = f"{file_of(tmp_path)}:process"
    place = Place(tmp_path, url, rollout_all_samples_process_path=path, **FILTER)

    async def body() -> None:
        seal = await place.segment(await place.ready(), 0)
        [groups] = told(tmp_path)
        verdicts = {group.entry.verdict for group in seal.groups}
        assert sorted(groups) == [[group.entry.group_id, 4] for group in seal.groups]
        assert "dropped" in verdicts and "kept" in verdicts

    asyncio.run(body())


DRAWS = """
def process(args, all_samples, data_source):
    assert len(data_source) > 0 and data_source.get_metadata() == {}
    assert data_source.get_buffer_length() == 0
    data_source.get_samples(1)
"""


def test_one_that_would_draw_is_told_that_it_cannot(tmp_path, url, caplog):
    path = f"{file_of(tmp_path, DRAWS)}:process"
    place = Place(tmp_path, url, rollout_all_samples_process_path=path)

    async def body() -> None:
        worker = await place.ready()
        await place.segment(worker, 0)
        assert worker._told.failed == 1

    asyncio.run(body())
    assert "sees no get_samples of the data source and cannot draw from it" in caplog.text


def test_what_was_reported_is_told_again_and_rows_that_cannot_be_read_cost_nothing(
    tmp_path, url, monkeypatch
):
    path = file_of(tmp_path, BATCH + FUNCTION)
    place = Place(
        tmp_path, url, custom_rollout_log_function_path=f"{path}:extra",
        rollout_function_path=f"{path}:rollout",
    )  # fmt: skip

    async def body() -> None:
        await place.segment(await place.ready(), 0)
        resumed = await place.ready(1)
        await resumed.generate(1, 0)
        assert told(tmp_path) == [{"rollout/mine": 7.0}] * 2

        def damaged(*_: object) -> None:
            raise DigestError("a part is damaged")

        monkeypatch.setattr(log_hooks, "open_groups", damaged)
        await resumed.generate(1, 0)
        assert len(told(tmp_path)) == 2 and resumed._told.failed == 1

    asyncio.run(body())


def test_an_evaluation_is_told_by_dataset(tmp_path, url):
    datasets = [{"name": "held", "path": f"{HELDOUT}@[0:8]", "label_key": "label"}]
    place = Place(
        tmp_path, url, custom_eval_rollout_log_function_path=f"{file_of(tmp_path)}:evaluated"
    )
    place.overrides["eval_interval"] = 1
    place.overrides["eval_config"] = {"defaults": {"temperature": 0.0}, "datasets": datasets}

    async def body() -> None:
        worker = await place.ready()
        await worker.evaluate(0, EvalJob(1, "l0-1", "held"))
        [[number, name, rewards, truncated, labels, metrics]] = told(tmp_path)
        rows = [json.loads(line) for line in Path(HELDOUT).read_text().splitlines()[:8]]
        assert (number, name, labels) == (1, "held", [row["label"] for row in rows])
        assert len(rewards) == len(truncated) == 8
        assert metrics["reward"] == pytest.approx(sum(rewards) / 8)

    asyncio.run(body())


@pytest.mark.parametrize("how", BAD)
def test_one_that_fails_costs_nothing(how, tmp_path, url, caplog):
    path = f"{file_of(tmp_path, BAD[how])}:log"
    place = Place(tmp_path, url, custom_rollout_log_function_path=path)

    async def body() -> None:
        worker = await place.ready()
        worker._told.timeout_s = 0.2 if how == "hangs" else 30.0
        seal = await place.segment(worker, 0)
        assert len(seal.groups) == 4 and worker._told.failed == 1

    asyncio.run(body())
    [record] = [r for r in caplog.records if "was not told of 0" in r.getMessage()]
    assert "custom_rollout_log_function_path" in record.getMessage()
    assert WORDS[how] in record.getMessage() and path in record.getMessage()


def test_one_that_cannot_be_called_so_is_refused_at_the_start(tmp_path, url):
    path = f"{file_of(tmp_path)}:too_few"
    place = Place(tmp_path, url, custom_rollout_log_function_path=path)
    with pytest.raises(PluginError, match=r"too_few.*rollout_extra_metrics, rollout_time"):
        asyncio.run(place.ready())
