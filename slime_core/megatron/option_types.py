"""Whether a value fits the type of a Megatron option, and what to say if not."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

from slime_core.errors import ConfigError
from slime_core.megatron.declared import Dtype

DTYPES = ("float32", "float16", "bfloat16", "uint8")


def check_type(given: str, value: Any, expected: Any) -> None:
    """Refuses a value of another type than the option's.

    Raises:
        ConfigError: names the option, what it takes and the value.
    """
    if not _fits(value, expected):
        raise ConfigError(f"megatron option {given!r} must be {_words(expected)}, not {value!r}")


def _words(expected: Any) -> str:
    """A type for people: a choice with its values, else its name."""
    if typing.get_origin(expected) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(expected)))}"
    if _is_dtype(expected):
        return f"one of {', '.join(DTYPES)}"
    return getattr(expected, "__name__", str(expected).replace("typing.", ""))


def _fits(value: Any, expected: Any) -> bool:
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in typing.get_args(expected))
    if origin is typing.Literal:
        return value in typing.get_args(expected)
    if expected is type(None) or expected is None:
        return value is None
    if expected is bool or expected is int:
        return type(value) is expected
    if expected is float:
        return type(value) in (int, float)
    if expected is str or expected is list or origin is list:
        return isinstance(value, expected if origin is None else list)
    if isinstance(expected, type) and issubclass(expected, enum.Enum):
        return isinstance(value, str) and value in expected.__members__
    return value in DTYPES if _is_dtype(expected) else True


def _is_dtype(expected: Any) -> bool:
    of_torch = getattr(expected, "__module__", "") == "torch" and expected.__name__ == "dtype"
    return of_torch or expected is Dtype
