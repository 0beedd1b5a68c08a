"""Fixed tokens whose log-probs prove which weights an engine serves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime_core.errors import EngineError
from slime_core.seeds import derive_seed

CANARY_TOKENS = 64
TOLERANCE_FP32 = 1e-5
TOLERANCE_TF32 = 0.05
TOLERANCE_BF16 = 0.3


@dataclass(frozen=True)
class CanaryReading:
    """The trainer's view of the canary.

    Attributes:
        tokens: [n] ids.
        log_probs: [n - 1] log-probs of tokens 1..n-1 at temperature 1 (natural log).
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]


def canary_tokens(vocab_size: int, max_positions: int) -> tuple[int, ...]:
    """Pseudo-random ids, the same for every run of a model.

    Args:
        vocab_size: ids are in [0, vocab_size).
        max_positions: context length; the canary with one new token fits into it.
    """
    count = min(CANARY_TOKENS, max_positions - 1)
    return tuple(derive_seed("canary", position) % vocab_size for position in range(count))


def largest_gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest absolute difference; infinite where a value is not a number.

    Raises:
        EngineError: another number of log-probs came back.
    """
    if len(ours) != len(theirs):
        raise EngineError(f"{len(theirs)} canary log-probs came back, {len(ours)} were expected")
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)


def tolerance_for(dtype: str, configured: float | None, engine: str = "embedded") -> float:
    """The allowed difference: as configured, else by the model's dtype and the kind of engine.

    SGLang multiplies float32 matrices of its attention in tf32.
    """
    if configured is not None:
        return configured
    if dtype != "float32":
        return TOLERANCE_BF16
    return TOLERANCE_TF32 if engine == "sglang" else TOLERANCE_FP32
