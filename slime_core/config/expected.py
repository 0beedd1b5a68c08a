"""What a field takes, in words: for messages about a value that does not fit."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "keys and values",
}
PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}
BOUNDS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


def expected(info: FieldInfo) -> str:
    """For example "a whole number of at least 1, or none"."""
    bounds = [
        f"{words} {_number(getattr(mark, name))}"
        for mark in info.metadata
        for name, words in BOUNDS.items()
        if getattr(mark, name, None) is not None
    ]
    kinds = members(info.annotation)
    shown = [_shown(kind) for kind in kinds if kind is not type(None)]
    text = " or ".join(shown) + (f" {' and '.join(bounds)}" if bounds else "")
    return f"{text}, or none" if type(None) in kinds else text


def members(annotation: Any) -> list[Any]:
    """The plain types of an annotation: unions and Annotated taken apart."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [kind for item in get_args(annotation) for kind in members(item)]
    return [annotation]


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _shown(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if origin is list:
        return f"a list of {PLURALS.get(get_args(kind)[0], 'values')}"
    return WORDS.get(origin or kind, str(kind))
