"""What a trainer rank is asked to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainCall:
    """One iteration's training.

    Attributes:
        epoch: the caller's; ranks refuse a lower one than they know.
        expect: state digest the ranks must be at.
        next_state: state digest after it.
        seed: H(run seed, iteration).
        forced_skips: on replay, which steps the first run skipped.
    """

    iteration: int
    epoch: int
    expect: str
    next_state: str
    batch_digest: str
    seed: int
    forced_skips: tuple[bool, ...] | None = None
