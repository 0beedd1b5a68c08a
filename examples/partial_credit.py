"""A reward of one's own: the share of digits that stand where they belong.

    slime train examples/partial-credit.yaml

The function returns several values; `reward_key` says which of them is trained, and each of them
becomes a metric (rollout/reward/score, rollout/reward/exact).
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any


async def reward_func(args: Any, sample: Any, **kwargs: Any) -> dict[str, float]:
    """1.0 for a right answer, less for each digit in the wrong place, 0.0 for none."""
    right = sample.label or sample.metadata["answer"]
    answer = sample.response.removesuffix("<eos>").strip()
    places = list(zip_longest(answer, right))
    hits = sum(given == wanted for given, wanted in places)
    return {"score": hits / len(places), "exact": float(answer == right)}
