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

    chat_template = "yes"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        places = [(i, i + 1) for i in range(len(text))]
        return {"input_ids": self.encode(text), "offset_mapping": places}

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        text = "".join(f"{m['role'][0]}:{m['content']};" for m in messages)
        return text + ("a:" if options["add_generation_prompt"] else "")


def learned(label: str | None, limit: int = 8, messages: Any = None) -> Sample:
    unused: Any = None
    runtime = Runtime(
        args=SimpleNamespace(max_turns=1),
        tokenizer=Characters(),
        gate=unused,
        hub=unused,
        sampling=Sampling(limit, {}, 5.0),
        seed_of=lambda _: 0,
    )
    prompt = "21=" if messages is None else messages
    sample = Sample(group_index=3, index=3, prompt=prompt, tokens=[50, 49, 61], label=label)
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


def said(*turns: str) -> list[dict[str, Any]]:
    roles = {"u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]


def test_what_the_assistant_says_in_a_conversation_is_trained():
    row = learned(None, limit=99, messages=said("u1", "a23", "t4", "a5", "u6"))
    text = "u:1;a:23;t:4;a:5;u:6;"
    start, end = text.index("23"), text.index("5;") + 2
    assert row.tokens == [ord(c) for c in text[:end]], "what follows the last answer is left out"
    assert row.response == text[start:end] and row.response_length == end - start
    assert row.loss_mask is not None
    trained = "".join(c for c, m in zip(text[start:end], row.loss_mask, strict=True) if m)
    assert trained == "23;5;" and row.status is Status.COMPLETED
    cut = learned(None, limit=2, messages=said("u1", "a23"))
    assert (cut.response, cut.loss_mask, cut.status) == ("23", [1, 1], Status.TRUNCATED)


def test_a_conversation_without_an_answer_is_named():
    with pytest.raises(DataError, match=r"sample 3.* its messages need one of an assistant"):
        learned(None, messages=said("u1"))
