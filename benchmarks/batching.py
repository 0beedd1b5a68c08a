"""How long 2,048 lengths take to be cut into micro-batches: `python -m benchmarks.batching`.

Least CPU time of a few runs, in ms, since the machine may be shared. The aim is 10 ms each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from slime_core.batching.partition import fast_partitions, first_fit, near_equal_partitions
from slime_core.batching.schedule import SchedulePolicy, SequenceCost, schedule_step

SAMPLES = 2048
CAP_TOKENS = 16384
AIM_MS = 10.0
RUNS = 7


def best_ms(function: Callable[..., object], *arguments: Any) -> float:
    """Least CPU time of a few calls, in ms."""
    seconds = []
    for _ in range(RUNS):
        start = time.process_time()
        function(*arguments)
        seconds.append(time.process_time() - start)
    return min(seconds) * 1e3


def lengths_of(seed: int) -> list[int]:
    """Log-normal lengths in tokens, as responses have."""
    drawn = np.random.default_rng(seed).lognormal(7.5, 0.8, SAMPLES).astype(int) + 1
    return np.minimum(drawn, CAP_TOKENS).tolist()


def main() -> int:
    lengths, rows = lengths_of(0), range(SAMPLES)
    by_tokens = SchedulePolicy(max_tokens=CAP_TOKENS)
    by_cost = SchedulePolicy(max_tokens=CAP_TOKENS, cost=SequenceCost(1.0, 1e-4))
    found = {
        "first fit": best_ms(first_fit, lengths, CAP_TOKENS),
        "near-equal partitions, 8 ranks": best_ms(near_equal_partitions, lengths, 8),
        "fast partitions, 64 ranks": best_ms(fast_partitions, lengths, 64),
        "a step by tokens, 8 ranks": best_ms(schedule_step, lengths, rows, 8, by_tokens),
        "a step by cost, 8 ranks": best_ms(schedule_step, lengths, rows, 8, by_cost),
    }
    print("| what | ms |\n| --- | --- |")
    for name, taken_ms in found.items():
        print(f"| {name} | {taken_ms:.1f} |")
    return int(max(found.values()) > AIM_MS)


if __name__ == "__main__":
    raise SystemExit(main())
