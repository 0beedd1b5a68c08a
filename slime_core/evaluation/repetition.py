"""A cheap sign that a long response repeats itself."""

from __future__ import annotations

import zlib

TAIL_CHARS = 10_000
REPEATED_RATIO = 10.0


def has_repetition(text: str) -> bool:
    """Whether the last 10,000 characters of a longer text compress more than tenfold."""
    if len(text) <= TAIL_CHARS:
        return False
    tail = text[-TAIL_CHARS:].encode("utf-8", "surrogatepass")
    return len(tail) / len(zlib.compress(tail)) > REPEATED_RATIO
