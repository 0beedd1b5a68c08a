"""The conversations of a session: which one a request goes on with, by the messages alone.

A conversation is named by the tools it began with and the messages so far. A request that repeats
a recorded conversation and adds to it extends that branch. One that repeats only its beginning (the
agent tried something else, asked twice, or shortened its history) begins a branch of its own there:
what came before is context in the new branch and is trained in the old one only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slime_core.sample import Sample


@dataclass(frozen=True)
class Point:
    """Where a turn ended: after so many messages (its answer included) and tokens."""

    messages: int
    tokens: int


@dataclass
class Branch:
    """One line of turns, which becomes one row.

    Attributes:
        number: in the order in which branches began.
        tools: digest of the tools offered.
        sample: tokens, log-probs, spans and mask so far.
        keys: names of its messages (requests.message_key), answers included.
        points: the end of each recorded turn, those of its origin included.
        turns: own turns.
        busy: a request goes on with it right now.
    """

    number: int
    tools: str
    sample: Sample
    keys: list[str] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    turns: int = 0
    busy: bool = False


@dataclass(frozen=True)
class Place:
    """Where a request goes on: at a point of a branch; without a branch from the start.

    Attributes:
        extends: it is the end of the branch, and nobody else goes on with it.
    """

    branch: Branch | None = None
    point: Point = Point(0, 0)
    extends: bool = False


def find_place(branches: Sequence[Branch], tools: str, keys: Sequence[str]) -> Place:
    """The longest recorded conversation that a request repeats; a branch's end comes first."""
    best = Place()
    for branch in branches:
        if branch.tools != tools:
            continue
        for number, point in enumerate(branch.points):
            if point.messages >= len(keys) or branch.keys[: point.messages] != list(
                keys[: point.messages]
            ):
                continue
            extends = number == len(branch.points) - 1 and not branch.busy
            rank, found = (point.messages, extends), (best.point.messages, best.extends)
            if best.branch is None or rank > found:
                best = Place(branch, point, extends)
    return best
