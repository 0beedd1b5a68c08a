"""Which cases there are: what is killed, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

BOUNDARIES = ("sample", "generate", "reward", "pack", "train", "sync", "evaluate")
VICTIMS = ("flow", "trainer", "engine", "rollout", "head", "everything")
FURTHER_VICTIMS = ("gcs", "raylet", "prefect")
"""Random cases kill these, too: the two halves of Ray's head, and Prefect's server."""

ITERATIONS, EVAL_INTERVAL, SAVE_INTERVAL = 6, 3, 2
RANDOM_CASES, MOST_KILLS = 20, 3
START_S, ITERATION_S = 9.0, 0.6
"""How far random moments reach into a start, and behind the end of an iteration's training."""
ENDS_WITH_THE_RUN = ("flow", "everything")


@dataclass(frozen=True)
class Kill:
    """One SIGKILL.

    Attributes:
        victim: whom it meets.
        hold: the point at which the run is held meanwhile, `train@3`; None for a moment in time.
        after: for a moment: the iteration whose ledger must be there; None counts from the start
            (or from the kill before, where the run outlived that).
        delay_s: for a moment: seconds after that.
    """

    victim: str
    hold: str | None = None
    after: int | None = None
    delay_s: float = 0.0

    def __str__(self) -> str:
        if self.hold is not None:
            return f"{self.victim} at {self.hold}"
        since = "the start" if self.after is None else f"ledger {self.after}"
        return f"{self.victim} {self.delay_s:.2f} s after {since}"


@dataclass(frozen=True)
class Case:
    """A run and what happens to it.

    Attributes:
        name: unique; also the name of its workspace.
        store: `file` or `s3`.
        kills: in their order.
    """

    name: str
    store: str
    kills: tuple[Kill, ...]


def boundary_cases() -> list[Case]:
    """Every boundary with every victim. A boundary is where a stage is about to begin, so what the
    stage before it commits is there and nothing of its own. The killed iteration varies: the
    distance to the last checkpoint is to vary, too."""
    cases: list[Case] = []
    for victim in VICTIMS:
        for boundary in BOUNDARIES:
            number = len(cases)
            # Evaluations are due after the third and the sixth iteration only.
            iteration = EVAL_INTERVAL - 1 if boundary == "evaluate" else 1 + number % 4
            kill = Kill(victim, hold=f"{boundary}@{iteration}")
            cases.append(Case(f"{boundary}-{victim}", _store(number), (kill,)))
    return cases


def random_cases(seed: int, count: int = RANDOM_CASES) -> list[Case]:
    """One to three kills each, at moments that the seed decides."""
    cases = []
    for number in range(count):
        numbers = random.Random(f"kill matrix/{seed}/{number}")
        kills: list[Kill] = []
        reached = -1
        for _ in range(numbers.randint(1, MOST_KILLS)):
            victim = numbers.choice(VICTIMS + FURTHER_VICTIMS)
            if numbers.random() < 0.3:
                kills.append(Kill(victim, delay_s=numbers.uniform(0, START_S)))
                continue
            reached = min(ITERATIONS - 2, numbers.randint(reached + 1, ITERATIONS - 2))
            delay_s = numbers.uniform(0, ITERATION_S)
            kills.append(Kill(victim, after=reached, delay_s=delay_s))
            if reached == ITERATIONS - 2:
                break
        cases.append(Case(f"random-{seed}-{number:02d}", _store(number), tuple(kills)))
    return cases


def _store(number: int) -> str:
    return ("file", "s3")[number % 2]
