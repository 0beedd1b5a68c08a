"""Graders without any parsing: the exact answer, and a coin."""

from __future__ import annotations

import random
from typing import Any


def grade_exact_match(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1.0 where the response is the label, white space around both aside."""
    return float(response.strip() == label.strip())


def grade_random(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """0.0 or 1.0 by chance: a baseline that no policy can learn."""
    return float(random.SystemRandom().randint(0, 1))
