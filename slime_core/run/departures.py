"""Compares the numbers of an iteration with those that its ledger holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_OF_THE_LAYOUT = frozenset({"micro_batches"})
_LATE = ("loss", "grad_norm", "lr")
_LARGEST = "_diff_max"


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be from the stored one.

    Attributes:
        relative: part of the stored value.
        absolute: besides; many metrics are differences of log-probs, and near 0.
        largest: the same for the largest difference of any token, in nats.
    """

    relative: float
    absolute: float
    largest: float

    @classmethod
    def of(cls, dtype: str, relative: float | None = None) -> Tolerance:
        """Of a precision on a CPU, or in its proportions from a relative part."""
        known = cls(1e-5, 3e-6, 1e-5) if dtype == "float32" else cls(2e-2, 1e-2, 0.3)
        if relative is None:
            return known
        scale = relative / known.relative
        return cls(relative, known.absolute * scale, known.largest * scale)

    def allowed(self, metric: str, stored: float) -> float:
        """The largest difference of a metric. Counts are exact."""
        if isinstance(stored, int):
            return 0.0
        floor = self.largest if metric.endswith(_LARGEST) else self.absolute
        return self.relative * abs(stored) + floor


@dataclass(frozen=True)
class MetricRow:
    """One metric of one optimizer step.

    Attributes:
        stored, now: its values; None where it is not there.
        difference: absolute.
        allowed: the most it may be.
    """

    step: int
    metric: str
    stored: float | None
    now: float | None
    difference: float
    allowed: float

    @property
    def departs(self) -> bool:
        return self.difference != 0 and not self.difference <= self.allowed  # NaN departs

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"departs": self.departs}


def compare_steps(
    stored: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]], tolerance: Tolerance
) -> list[MetricRow]:
    """Every number of every step in the order in which they are computed: what the forward pass
    reads, the loss, the gradient norm.

    Metrics that the stored step does not have are left out: a newer version may report more.
    """
    rows = []
    for number in range(max(len(stored), len(now))):
        then = _numbers(stored[number]) if number < len(stored) else {}
        again = _numbers(now[number]) if number < len(now) else {}
        for metric in sorted(then, key=_order):
            old, new = then[metric], again.get(metric)
            difference = math.nan if new is None else 0.0 if _same(old, new) else abs(new - old)
            allowed = tolerance.allowed(metric, old)
            rows.append(MetricRow(number, metric, old, new, difference, allowed))
    return rows


def first_departure(rows: Sequence[MetricRow]) -> MetricRow | None:
    """The first row that departs, None where none does."""
    return next((row for row in rows if row.departs), None)


def _numbers(step: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in step.items()
        if isinstance(value, (int, float)) and name not in _OF_THE_LAYOUT
    }


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _order(metric: str) -> tuple[int, str]:
    if metric in _LATE:
        return 2 + _LATE.index(metric), metric
    return (0 if metric.startswith("rollout/") else 1), metric
