"""Supervised samples: the label is the response, and only it is trained."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slime_core.errors import DataError
from slime_core.rollout.custom import load_generate
from slime_core.rollout.generate import Sampling
from slime_core.rollout.runtime import Runtime
from slime_core.sample import Sample, Status

EOS = 0


class Characters:
    """One token a character."""

    eos_token_id = EOS

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]


def learned(label: str | None, limit: int = 8) -> Sample:
    unused: Any = None
    runtime = Runtime(
        args=SimpleNamespace(max_turns=1),
        tokenizer=Characters(),
        gate=unused,
        hub=unused,
        sampling=Sampling(limit, {}, 5.0),
        seed_of=lambda _: 0,
    )
    sample = Sample(group_index=3, index=3, prompt="21=", tokens=[50, 49, 61], label=label)
    generate = load_generate("slime_core.rollout.sft.generate")
    (row,) = asyncio.run(generate.run(runtime, [sample]))
    return row


def test_the_label_and_the_end_are_trained():
    row = learned("12")
    assert row.tokens == [50, 49, 61, 49, 50, EOS]
    assert (row.response, row.response_length, row.loss_mask) == ("12", 3, [1, 1, 1])
    assert (row.status, row.reward, row.rollout_log_probs) == (Status.COMPLETED, 0.0, None)
    assert row.effective_response_length == 3


def test_a_long_answer_is_cut_and_says_so():
    row = learned("12345678", limit=4)
    assert row.tokens[3:] == [49, 50, 51, 52] and row.status is Status.TRUNCATED
    assert learned("1234567", limit=8).status is Status.COMPLETED, "the end token fits"


def test_a_row_without_an_answer_is_named():
    with pytest.raises(DataError, match=r"sample 3.* has no answer to learn: set label_key"):
        learned(None)
