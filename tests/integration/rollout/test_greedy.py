"""ReMax: each group comes with the greedy answer to its prompt, graded and not trained."""

import asyncio
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.integration.rollout.conftest import MODEL
from tests.integration.rollout.places import Place

REMAX = {"advantage_estimator": "remax", "rm_type": "exact_match"}


def greedy_tokens(prompt: list[int], limit: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    found: list[int] = []
    with torch.no_grad():
        while len(found) < limit and not (found and found[-1] in ends):
            found.append(int(model(torch.tensor([prompt + found])).logits[0, -1].argmax()))
    return found


def test_the_greedy_answer_stands_in_the_rows_and_trains_nothing(tmp_path, url):
    async def generated(name: str, **overrides: Any) -> Any:
        place = Place(tmp_path / name, url, **overrides)
        return place, await place.segment(await place.ready(), 0)

    async def body() -> tuple[Any, ...]:
        return await generated("remax", **REMAX), await generated("plain", rm_type="exact_match")

    (place, seal), (plain_place, plain_seal) = asyncio.run(body())
    rows, plain = place.rows(seal), plain_place.rows(plain_seal)
    assert len(rows) == 4 and rows.keys() == plain.keys()
    rewards = []
    for key, samples in rows.items():
        first = samples[0]
        answer = first.metadata["greedy"]
        prompt = first.tokens[: len(first.tokens) - first.response_length]
        assert answer["tokens"] == greedy_tokens(list(prompt), 6)
        assert answer["reward"] == float(answer["response"].removesuffix("<eos>") == first.label)
        assert all(sample.metadata["greedy"] == answer for sample in samples)
        # What is sampled and trained is what it would be without the greedy answer.
        assert [s.tokens for s in samples] == [s.tokens for s in plain[key]]
        assert [s.reward for s in samples] == [s.reward for s in plain[key]]
        rewards.append(answer["reward"])
    assert set(rewards) == {0.0, 1.0}, "some are right and some are not"
