"""The examples run as they are shipped."""

import asyncio
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.loading import load_config
from slime_core.rollout.settings import EvalJob
from slime_core.sample import Sample
from slime_core.store.documents import read_document
from tests.integration.rollout.places import Place

EXAMPLES = sorted(Path("examples").glob("*.yaml"))


def one_segment(folder: Path, url: str, name: str) -> list[list[Sample]]:
    place = Place(folder, url, f"examples/{name}.yaml")

    async def body() -> Any:
        return await place.segment(await place.ready(), 0)

    return list(place.rows(asyncio.run(body())).values())


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_every_example_is_a_valid_configuration(path):
    assert load_config(path, {}).run.run_name == path.stem


def test_partial_credit_is_the_share_of_digits_in_their_place(tmp_path, url):
    groups = one_segment(tmp_path, url, "partial-credit")
    for sample in (one for group in groups for one in group):
        answer = sample.response.removesuffix("<eos>").strip()
        pairs = list(zip_longest(answer, sample.label))
        assert sample.reward["score"] == sum(a == b for a, b in pairs) / len(pairs)
        assert sample.reward["exact"] == float(answer == sample.label)


def test_a_second_try_is_worth_half_and_what_is_asked_is_not_trained(tmp_path, url):
    samples = [one for group in one_segment(tmp_path, url, "second-try") for one in group]
    tries = {sample.metadata["round_number"] for sample in samples}
    assert tries <= {1, 2, 3} and {1, 3} <= tries
    for sample in samples:
        count = sample.metadata["round_number"]
        right = sample.response == sample.label
        assert sample.reward == (0.5 ** (count - 1) if right else 0.0)
        asked = [span for span in sample.spans if not span.trainable]
        assert sum(span.length for span in asked) == sample.loss_mask.count(0)
        assert all(span.length == len("1234=") for span in asked[: count - 1])


def test_the_agent_with_openais_client_is_worth_half_for_each_further_try(tmp_path, url):
    samples = [one for group in one_segment(tmp_path, url, "agent") for one in group]
    assert {sample.metadata["round_number"] for sample in samples} >= {1, 3}
    for sample in samples:
        tries = sample.metadata["round_number"]
        assert sample.reward == (0.5 ** (tries - 1) if sample.response == sample.label else 0.0)
        assert len(sample.spans) == 2 * tries - 1


def test_evaluation_asks_once(tmp_path, url):
    options = {
        "eval_interval": 1,
        "eval_config": {
            "datasets": [{"name": "one", "path": "configs/quickstart/heldout.jsonl@[0:20]"}]
        },
    }
    place = Place(tmp_path, url, "examples/second-try.yaml", **options)

    async def body() -> Any:
        worker = await place.ready()
        return await worker.evaluate(0, EvalJob(1, "l0-1", "one"))

    metrics = read_document(place.backend, asyncio.run(body()).uri).body["metrics"]
    assert metrics["reward"] == metrics["pass@1"], "a first try is worth 1 or 0"
