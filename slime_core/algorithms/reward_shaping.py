"""Rewards by length, and the test for groups without signal. Plain floats, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from slime_core.errors import ConfigError, DataError

ZERO_STD_TOLERANCE = 1e-6


def overlong_penalty(
    response_tokens: int, max_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> float:
    """What DAPO adds to the reward of a long answer: from 0 down to -factor over the buffer.

    0 up to max - buffer, then linear, and -factor from max on (capped, so that an answer beyond
    the limit is not punished without bound). Yu et al. 2025, arXiv:2503.14476, equation 13.

    Args:
        response_tokens: tokens of the answer.
        max_tokens: where the penalty is full.
        buffer_tokens: tokens over which it grows, 1..max_tokens.
        factor: size of the full penalty, >= 0.
    """
    if not 1 <= buffer_tokens <= max_tokens or factor < 0:
        raise ConfigError(
            f"overlong shaping needs 1 <= buffer <= max tokens and a factor >= 0, got buffer "
            f"{buffer_tokens}, max {max_tokens}, factor {factor}"
        )
    beyond = response_tokens - (max_tokens - buffer_tokens)
    return -factor * min(max(beyond / buffer_tokens, 0.0), 1.0)


def cosine_scaled(
    correct: bool,
    response_tokens: int,
    max_tokens: int,
    right: tuple[float, float] = (0.5, 1.0),
    wrong: tuple[float, float] = (-1.0, -0.5),
) -> float:
    """A reward that moves along a cosine with length: right answers better when short, wrong ones
    less bad when long. Yeo et al. 2025, arXiv:2502.03373.

    Args:
        correct: whether the answer is right.
        response_tokens: tokens of the answer; beyond max_tokens nothing changes any more.
        max_tokens: > 0.
        right: (reward at max length, reward at length 0) of a right answer.
        wrong: (reward at length 0, reward at max length) of a wrong answer.
    """
    if max_tokens < 1:
        raise ConfigError(f"cosine-scaled rewards need max_tokens of at least 1, got {max_tokens}")
    progress = min(max(response_tokens / max_tokens, 0.0), 1.0)
    at_end, at_start = right if correct else (wrong[1], wrong[0])
    return at_end + 0.5 * (at_start - at_end) * (1 + math.cos(math.pi * progress))


def is_zero_std(rewards: Sequence[float], tolerance: float = ZERO_STD_TOLERANCE) -> bool:
    """True if a group's raw rewards are equal up to the tolerance: it teaches nothing.

    Unbiased std in float64: float32 kept identical groups. A group of one counts as equal.

    Raises:
        DataError: no reward, or one that is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise DataError(f"the rewards of a group must be finite numbers, got {list(rewards)!r}")
    return values.size == 1 or bool(values.std(ddof=1) <= tolerance)
