"""Sampling parameters of a request: SGLang's names, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from slime_core.engines.embedded.errors import RefusedRequestError

DEFAULT_MAX_NEW_TOKENS = 128
GREEDY_BELOW = 1e-6
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, [], ""),
    "custom_params": (None, {}),
    "stream_interval": (None, 1),
    "spaces_between_special_tokens": (None, True, False),
}
"""SGLang's other parameters with the values that change nothing here."""


@dataclass(frozen=True)
class SamplingParams:
    """How one sample is drawn.

    Attributes:
        max_new_tokens: None means "up to 128, or what the context leaves".
        temperature: below 1e-6 the most probable token is taken.
        top_k: -1 keeps all tokens.
        ignore_eos: neither the model's end tokens nor stop_token_ids stop the sample.
        no_stop_trim: keep the matched stop token or string in the text.
        sampling_seed: the sample depends on it, the prompt and the weights only.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def filters(self) -> bool:
        """True when some tokens are cut away before the draw."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @classmethod
    def from_json(cls, body: Any) -> SamplingParams:
        """Reads the `sampling_params` object of a request.

        Raises:
            RefusedRequestError: a name that is not SGLang's, a value out of range, or a parameter
                that this engine does not implement.
        """
        if body is None:
            return cls()
        if not isinstance(body, dict):
            raise RefusedRequestError(
                f"sampling_params must be an object, got {type(body).__name__}"
            )
        values = {}
        for name, value in body.items():
            if name in NEUTRAL:
                if value not in NEUTRAL[name]:
                    raise RefusedRequestError(
                        f"the embedded engine does not support {name}={value!r}"
                    )
            elif name not in READERS:
                raise RefusedRequestError(f"sampling_params has no parameter {name!r}")
            elif value is not None:
                values[name] = READERS[name](name, value)
        params = cls(**values)
        if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
            raise RefusedRequestError(
                f"min_new_tokens {params.min_new_tokens} is more than max_new_tokens "
                f"{params.max_new_tokens}"
            )
        return params


def _integer(low: int, high: int | None = None):
    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise RefusedRequestError(f"{name} must be an integer, got {value!r}")
        if value < low or (high is not None and value > high):
            upper = "" if high is None else f" and at most {high}"
            raise RefusedRequestError(f"{name} must be at least {low}{upper}, got {value}")
        return value

    return read


def _number(low: float, high: float = math.inf, above: bool = False):
    def read(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RefusedRequestError(f"{name} must be a number, got {value!r}")
        if not low <= value <= high or (above and value == low) or value == math.inf:
            bracket = "(" if above else "["
            raise RefusedRequestError(f"{name} must be in {bracket}{low}, {high}], got {value}")
        return float(value)

    return read


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RefusedRequestError(f"{name} must be true or false, got {value!r}")
    return value


def _top_k(name: str, value: Any) -> int:
    value = _integer(-1)(name, value)
    if value == 0:
        raise RefusedRequestError("top_k must be -1 (all tokens) or at least 1, got 0")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise RefusedRequestError(f"{name} must be a string or a list of strings, got {value!r}")
    return tuple(items)


def _token_set(name: str, value: Any) -> frozenset[int]:
    items = [value] if isinstance(value, int) else value
    if not isinstance(items, list) or not all(type(item) is int for item in items):
        raise RefusedRequestError(f"{name} must be a list of token ids, got {value!r}")
    return frozenset(items)


READERS = {
    "max_new_tokens": _integer(0),
    "min_new_tokens": _integer(0),
    "temperature": _number(0.0),
    "top_p": _number(0.0, 1.0, above=True),
    "top_k": _top_k,
    "min_p": _number(0.0, 1.0),
    "n": _integer(1, 4096),
    "stop": _strings,
    "stop_token_ids": _token_set,
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "no_stop_trim": _flag,
    "sampling_seed": _integer(-(2**63), 2**63 - 1),
}
