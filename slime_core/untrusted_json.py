"""JSON that a model, an agent or a stranger's file wrote: one kind of error for all that is wrong.

What Python's reader takes, but nobody can use further on, is refused as well: half of a surrogate
pair (no encoder takes it) and nesting that exhausts the stack of whatever walks the value later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 100
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: with what is wrong; a JSONDecodeError for what is no JSON.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error
    if text.count("[") + text.count("{") > MAX_DEPTH and _deeper(value, MAX_DEPTH):
        raise ValueError(f"JSON is nested too deeply (more than {MAX_DEPTH} levels)")
    if SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # a UnicodeError is a ValueError
    return value


def _deeper(value: Any, limit: int) -> bool:
    """Whether more than `limit` lists and objects lie in each other."""
    level = [value]
    for _ in range(limit):
        level = [inner for outer in level for inner in _parts(outer)]
        if not level:
            return False
    return True


def _parts(value: Any) -> Iterator[Any]:
    """The lists and objects right inside a value."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (item for item in items if isinstance(item, (dict, list)))
