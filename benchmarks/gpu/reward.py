"""A reward for random weights: it costs nothing and differs between the samples of a group."""

from __future__ import annotations

from typing import Any


async def odd_share(args: Any, sample: Any, **_: Any) -> float:
    """Share of odd token ids in the response."""
    response = sample.tokens[-sample.response_length :]
    return sum(token % 2 for token in response) / max(1, len(response))
