"""What the settings of an evaluation dataset may be, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Kind = tuple[Callable[[Any], bool], str]


def wrong_values(values: Mapping[str, Any]) -> list[str]:
    """A sentence for each setting whose value cannot be; None counts as not given."""
    problems = []
    for name, (fits, wanted) in KINDS.items():
        value = values.get(name)
        if value is not None and not fits(value):
            problems.append(f"{name} must be {wanted}, not {value!r}")
    return problems


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value % 1 == 0 and value >= 1


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(item) is kind for item in value)


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return _is_list_of(str, texts) and all(texts)


TEXT: Kind = (lambda value: isinstance(value, str), "text")
COUNT: Kind = (_is_count, "a whole number from 1")
SWITCH: Kind = (lambda value: isinstance(value, bool), "true or false")
TREE: Kind = (lambda value: isinstance(value, Mapping), "keys and values")

KINDS: dict[str, Kind] = {
    "path": TEXT,
    "rm_type": TEXT,
    "custom_rm_path": TEXT,
    "input_key": TEXT,
    "label_key": TEXT,
    "metadata_key": TEXT,
    "tool_key": TEXT,
    "custom_generate_function_path": TEXT,
    "multimodal_keys": TREE,
    "apply_chat_template": SWITCH,
    "apply_chat_template_kwargs": TREE,
    "metadata_overrides": TREE,
    "n_samples_per_eval_prompt": COUNT,
    "max_response_len": COUNT,
    "max_prompt_len": COUNT,
    "min_eval_samples": COUNT,
    "temperature": (lambda value: _is_number(value) and value >= 0, "a number of at least 0"),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0, at most 1"),
    "top_k": (
        lambda value: type(value) is int and (value == -1 or value >= 1),
        "-1 (all tokens) or a whole number from 1",
    ),
    "repetition_penalty": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "min_new_tokens": (
        lambda value: type(value) is int and value >= 0,
        "a whole number of at least 0",
    ),
    "stop": (_is_stop, "a text or a list of texts, none of them empty"),
    "stop_token_ids": (lambda value: _is_list_of(int, value), "a list of token ids"),
    "skip_special_tokens": SWITCH,
    "no_stop_trim": SWITCH,
}
