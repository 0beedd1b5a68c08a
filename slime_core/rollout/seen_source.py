"""The data source as functions see it that are told what was generated."""

from __future__ import annotations

import copy
from typing import Any


class SeenSource:
    """Answers questions about a data source; nothing can be drawn, given back or changed through
    it, since what a batch draws is decided before anybody is told of it.

    Args:
        inner: the user's own source, None where prompts come from a file.
        length: prompts in one pass, 0 where that is not known.
        waiting: groups that came back and begin later.
    """

    def __init__(self, inner: Any = None, length: int = 0, waiting: int = 0) -> None:
        self._inner = inner
        self._length = length
        self._waiting = waiting

    def __len__(self) -> int:
        return self._length

    def get_buffer_length(self) -> int:
        """Groups that wait and were begun before."""
        own = getattr(self._inner, "get_buffer_length", None)
        return self._waiting if own is None else own()

    def get_metadata(self) -> dict[str, Any]:
        """A copy of the source's own values."""
        own = getattr(self._inner, "get_metadata", None)
        return {} if own is None else copy.deepcopy(own())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a function that is told of samples sees no {name} of the data source and cannot draw "
            "from it; it may call len(), get_buffer_length and get_metadata"
        )
