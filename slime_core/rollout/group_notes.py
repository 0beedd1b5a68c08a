"""What the helpers of whole rollout functions saw of groups, so that those which such a function
neither returns nor gives back are stored with their answers and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_core.rollout.runtime import Runtime, current_or_none
from slime_core.sample import Sample

ANSWERS, DROPS = "answers of groups", "drops of groups"


def note_answers(rows: Sequence[Sample]) -> None:
    """Remembers the rows of a group that was answered."""
    _note(ANSWERS, rows, list(rows))


def note_drop(rows: Sequence[Any], reason: str | None) -> None:
    """Remembers that a filter dropped a group."""
    _note(DROPS, rows, f"dynamic_filter/{reason or 'filtered'}")


def answers_of(runtime: Runtime, number: int) -> list[Sample]:
    """The rows of a group, [] where no helper answered it."""
    return runtime.notes.get(ANSWERS, {}).get(number, [])


def drop_of(runtime: Runtime, number: int) -> str | None:
    """Why a filter dropped a group, None where none did."""
    return runtime.notes.get(DROPS, {}).get(number)


def _note(kind: str, rows: Sequence[Any], what: Any) -> None:
    runtime = current_or_none()
    number = getattr(rows[0], "group_index", None) if rows else None
    if runtime is not None and number is not None:
        runtime.notes.setdefault(kind, {})[number] = what
