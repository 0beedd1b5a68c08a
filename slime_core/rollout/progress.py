"""When a segment has what it needs: a pure function of which groups ended how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from slime_core.store.parts import FINAL, KEPT, SPARE


class Progress:
    """Counts the groups of a segment.

    Whole groups are taken in the order of their ids: the segment is decided once the groups up to
    some id have all ended and `target` of them are kept. Which ended first does not matter, so
    the same outcomes give the same segment, killed or not, and short answers are not preferred.
    With `first_come` (partial rollout, where nothing that was begun is lost) any `target` kept
    groups decide it.

    Args:
        target: groups needed.
        first_come: take the first that end.
    """

    def __init__(self, target: int, *, first_come: bool = False) -> None:
        self._target = target
        self._first_come = first_come
        self._verdicts: dict[int, str | None] = {}
        self._counts: Counter[str | None] = Counter()  # of each verdict, None: under way

    def begin(self, group_ids: Iterable[int]) -> None:
        """These groups are under way."""
        for group_id in group_ids:
            if group_id not in self._verdicts:
                self._set(group_id, None)

    def end(self, group_id: int, verdict: str) -> None:
        """A group came to its end; verdicts that are not final are ignored."""
        if verdict in FINAL:
            self._set(group_id, verdict)

    @property
    def kept(self) -> int:
        return self._count(KEPT)

    @property
    def missing(self) -> int:
        """Groups that have to be begun for the target to come into reach."""
        hopeful = self._count(KEPT, SPARE, None)
        return max(0, self._target - hopeful)

    @property
    def last(self) -> int | None:
        """The highest group id that the decided segment holds; None while it is open."""
        if self.kept < self._target and self._counts[None]:
            return None  # asked after each group: without a look at all of them
        kept = 0
        for group_id in sorted(self._verdicts):
            verdict = self._verdicts[group_id]
            if verdict is None and not self._first_come:
                return None
            kept += verdict == KEPT
            if kept == self._target and not self._first_come:
                return group_id
        over = not self._counts[None]
        enough = kept >= self._target or (over and self._count(KEPT, SPARE) >= self._target)
        return max(self._verdicts) if enough else None

    @property
    def decided(self) -> bool:
        """The segment has what it needs."""
        return self.last is not None

    def sealed(self) -> set[int]:
        """Groups that the decided segment holds."""
        last = self.last
        return {g for g, v in self._verdicts.items() if last is not None and v and g <= last}

    def _count(self, *verdicts: str | None) -> int:
        return sum(self._counts[verdict] for verdict in verdicts)

    def _set(self, group_id: int, verdict: str | None) -> None:
        if group_id in self._verdicts:
            self._counts[self._verdicts[group_id]] -= 1
        self._verdicts[group_id] = verdict
        self._counts[verdict] += 1
