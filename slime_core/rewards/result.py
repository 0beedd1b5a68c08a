"""What grading gives: a score, or a failure with its reason. Never a silent 0."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.errors import RewardError

REASONS = (
    "timeout",
    "crash",
    "memory",
    "exception",
    "no_label",
    "not_a_number",
    "non_finite",
    "reward_key",
    "remote",
    "wrong_count",
    "agent_error",
    "agent_timeout",
    "agent_silent",
)
UNKNOWN = "__repr__"
FAILED_BEFORE = "rollout_error"
"""Entry of a sample's metadata, {"reason", "message"}: why there is nothing to grade."""


@dataclass(frozen=True)
class Score:
    """A reward that may be trained on.

    Attributes:
        value: what the grader returned: a float, or a dict of values (`sample.reward`).
        number: the finite float to train on, `value` itself or its entry `reward_key`.
        grader: digest of the grader that gave it.
    """

    value: float | dict[str, Any]
    number: float
    grader: str


@dataclass(frozen=True)
class ScoreFailure:
    """A sample that could not be graded.

    Attributes:
        reason: one of REASONS; metrics count by it.
        message: what happened, in one sentence.
        grader: digest of the grader that failed.
    """

    reason: str
    message: str
    grader: str

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise ValueError(f"unknown failure reason {self.reason!r}")

    def raise_error(self) -> None:
        raise RewardError(f"{self.message} ({self.reason})")


ScoreResult = Score | ScoreFailure


def failed_before(metadata: Mapping[str, Any]) -> ScoreFailure | None:
    """The failure of the rollout itself, None where it gave something to grade."""
    told = metadata.get(FAILED_BEFORE)
    return ScoreFailure(str(told["reason"]), str(told["message"]), "") if told else None


def to_result(value: Any, grader: str, reward_key: str | None, name: str) -> ScoreResult:
    """Checks what a grader returned.

    Args:
        value: a real number (numpy scalars and bools count) or a dict.
        grader: digest of the grader.
        reward_key: entry of a dict to train on; must be set for dicts and only for them.
        name: the grader, for messages.
    """
    try:
        picked = value = plain(value)
    except RecursionError:
        message = f"{name} returned a value that is nested too deeply"
        return ScoreFailure("not_a_number", message, grader)
    if isinstance(value, dict) and set(value) == {UNKNOWN}:
        message = f"{name} returned {value[UNKNOWN]}, which is not a number"
        return ScoreFailure("not_a_number", message, grader)
    if isinstance(value, dict):
        if not reward_key:
            keys = ", ".join(map(str, value))
            message = f"{name} returned several values; choose one of {keys} with --reward-key"
            return ScoreFailure("reward_key", message, grader)
        if reward_key not in value:
            keys = ", ".join(map(str, value)) or "nothing"
            message = f"{name} returned no {reward_key!r} (--reward-key) but {keys}"
            return ScoreFailure("reward_key", message, grader)
        picked = value[reward_key]
    elif reward_key:
        message = f"--reward-key {reward_key} is set, but {name} returned {_short(value)}"
        return ScoreFailure("reward_key", message, grader)
    number = _number(picked)
    if number is None:
        message = f"{name} returned {_short(picked)}, which is not a number"
        return ScoreFailure("not_a_number", message, grader)
    if not math.isfinite(number):
        return ScoreFailure("non_finite", f"{name} returned {number}", grader)
    return Score(value if isinstance(value, dict) else number, number, grader)


def plain(value: Any) -> Any:
    """What a grader returned as the store and JSON can carry it: numbers, text, and lists and dicts
    of them (tuples and arrays are lists then); anything else by its repr."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "tolist"):
        value = value.tolist()  # of numpy or torch; a number where it has no dimension
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, numbers.Real) and not isinstance(value, (int, float)):
        return float(value)
    if value is None or isinstance(value, (int, float, str)):
        return value
    return {UNKNOWN: _short(value)}


def _number(value: Any) -> float | None:
    """A float from a number, a numpy scalar or a scalar tensor; None for anything else."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _short(value: Any) -> str:
    try:
        shown = repr(value)
    except Exception:
        shown = f"a {type(value).__name__} that cannot be shown"
    return shown if len(shown) <= 80 else shown[:77] + "..."
