"""Where a run stands in its data: what was drawn, what became of it, what comes next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from slime_core.errors import DigestError
from slime_core.store.batch import BatchContent
from slime_core.store.draws import Draw
from slime_core.store.parts import KEPT
from slime_core.store.seal import Segment, StoredGroup


@dataclass(frozen=True)
class Frontier:
    """The end of the log of draws.

    Attributes:
        next_seq: number of the next file of draws.
        next_group_id: id of the next draw.
        last_draw: (data_epoch, position) of the last one, None before the first.
        source_state: the data source's state after it, None where it cannot save one.
    """

    next_seq: int = 0
    next_group_id: int = 0
    last_draw: tuple[int, int] | None = None
    source_state: Any = None

    def after(self, draws: Sequence[Draw]) -> Frontier:
        """The frontier once these draws are logged as `next_seq`."""
        if not draws:
            return self
        last = draws[-1]
        return Frontier(
            self.next_seq + 1,
            last.group_id + 1,
            (last.data_epoch, last.position),
            last.source_state,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class GroupState:
    """What became of one draw.

    Attributes:
        draw: without its samples.
        stored: its finished rows, None while there are none.
        segment: the segment that holds them, -1 while there are none.
        sealed: that segment is closed.
        next_attempt: with which attempt it would be begun again.
        iteration: the iteration whose batch holds it.
        unused: why no iteration will train it, "" where one may.
    """

    draw: Draw
    stored: StoredGroup | None = None
    segment: int = -1
    sealed: bool = False
    next_attempt: int = 0
    iteration: int | None = None
    unused: str = ""

    @property
    def group_id(self) -> int:
        return self.draw.group_id

    @property
    def open(self) -> bool:
        """It has to be generated (again)."""
        return self.stored is None

    @property
    def ready(self) -> bool:
        """It is finished, sealed and kept, and no batch has decided about it."""
        return (
            self.stored is not None
            and self.sealed
            and self.stored.entry.verdict == KEPT
            and self.iteration is None
            and not self.unused
        )


@dataclass(frozen=True)
class GroupLog:
    """All groups of a run, by id, in the order of their draws. A projection: never stored."""

    groups: dict[int, GroupState] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        draws: Iterable[Draw],
        sealed: Iterable[Segment],
        unsealed: Iterable[Segment],
        batches: Iterable[BatchContent],
    ) -> GroupLog:
        """Puts together what the store says.

        Raises:
            DigestError: a draw is logged twice, or a segment or batch names one that is not logged.
        """
        log = cls()
        for draw in draws:
            if draw.group_id in log.groups:
                raise DigestError(f"draw {draw.group_id} is logged twice")
            log.groups[draw.group_id] = GroupState(draw)
        for segments, closed in ((sealed, True), (unsealed, False)):
            for segment in sorted(segments, key=lambda item: item.segment):
                log._add_segment(segment, closed)
        for batch in batches:
            log._add_batch(batch)
        return log

    def open_groups(self) -> list[GroupState]:
        """Draws without finished rows, in the order of drawing."""
        return [state for state in self.groups.values() if state.open]

    def ready_groups(self) -> list[GroupState]:
        """Finished groups that wait for a batch, in the order of drawing."""
        return [state for state in self.groups.values() if state.ready]

    def _add_segment(self, segment: Segment, sealed: bool) -> None:
        finished = segment.finished
        for group in segment.groups:
            state = self._state(group.entry.group_id, f"segment {segment.segment}")
            changes: dict[str, Any] = {
                "next_attempt": max(state.next_attempt, group.entry.attempt + 1)
            }
            if finished.get(group.entry.group_id) is group and state.stored is None:
                changes |= {"stored": group, "segment": segment.segment, "sealed": sealed}
            self._update(state, changes)

    def _add_batch(self, batch: BatchContent) -> None:
        where = f"batch {batch.iteration}"
        for group in batch.groups:
            state = self._state(group.group_id, where)
            if state.iteration is not None:
                raise DigestError(
                    f"group {group.group_id} is in the batches {state.iteration} and "
                    f"{batch.iteration}"
                )
            self._update(state, {"iteration": batch.iteration})
        for group_id, _, _, reason in batch.unused:
            self._update(self._state(group_id, where), {"unused": reason})

    def _state(self, group_id: int, where: str) -> GroupState:
        if group_id not in self.groups:
            raise DigestError(f"{where} holds group {group_id}, which no draw names")
        return self.groups[group_id]

    def _update(self, state: GroupState, changes: dict[str, Any]) -> None:
        self.groups[state.group_id] = replace(state, **changes)
