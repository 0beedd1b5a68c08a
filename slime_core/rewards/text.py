"""Small text helpers that graders share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from slime_core.untrusted_json import read_json

END_TOKENS = (
    "<eos>",
    "<pad>",
    "</s>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|user|>",
    "<|observation|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001
    "[EOS]",
    "[e~[",
)


def strip_end_tokens(text: str, extra: Iterable[str] = ()) -> str:
    """Removes white space and end-of-turn tokens from the end, as often as they occur."""
    tokens = (*extra, *END_TOKENS)
    while True:
        text = text.rstrip()
        token = next((item for item in tokens if item and text.endswith(item)), None)
        if token is None:
            return text
        text = text[: -len(token)]


def after_thinking(text: str, marker: str = "</think>") -> str:
    """What follows the last end of reasoning; the whole text where there is none."""
    return text.rpartition(marker)[2] if marker in text else text


def label_values(label: Any) -> list[str]:
    """A label as a list of accepted answers: JSON text of a list holds several, others one."""
    if isinstance(label, str) and label.lstrip().startswith("["):
        try:
            parsed = read_json(label)
        except ValueError:
            return [label]
        if isinstance(parsed, list):
            return [item if isinstance(item, str) else json.dumps(item) for item in parsed]
    if isinstance(label, (list, tuple)):
        return [str(item) for item in label]
    return [str(label)]
