"""What became of one attempt at a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from slime_core.errors import DataError
from slime_core.sample import Sample
from slime_core.store.codec import encode_samples
from slime_core.store.parts import DROPPED, KEPT


@dataclass(frozen=True)
class Outcome:
    """An attempt that came to its end.

    Attributes:
        samples: the rows, rollout by rollout; fan-out siblings one after another.
        graders: [rows] digest of what gave each reward.
        verdict: one of store.parts.VERDICTS.
        reason: why it is not simply kept; metrics count by it.
    """

    samples: Sequence[Sample]
    graders: Sequence[str | None] = field(default_factory=list)
    verdict: str = KEPT
    reason: str | None = None


def dropped(samples: Sequence[Sample], graders: Sequence[str | None], reason: str) -> Outcome:
    """An attempt whose group nothing will train."""
    return Outcome(samples, graders, DROPPED, reason)


def unstorable(samples: Sequence[Sample]) -> str | None:
    """Why rows that a plug-in touched cannot be stored, None where they can."""
    try:
        for sample in samples:
            sample.check_lengths()
        encode_samples(list(samples))
    except (DataError, pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        return str(error)
    return None
