"""The worker's view of the draw log: what was drawn for a segment, and drawing further."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from slime_core.data.sources import Draw as Taken
from slime_core.data.sources import DrawSource, Group
from slime_core.errors import SlimeError
from slime_core.sample import Sample
from slime_core.store.backend import Backend
from slime_core.store.cache import NodeCache
from slime_core.store.draws import Draw, list_draws, log_draws, read_draws


class DrawLog:
    """Takes prompts from the source and logs them before any request leaves.

    Args:
        backend: the run's store.
        source: where prompts come from; follows the log.
        prepare: gives a drawn sample its prompt tokens.
    """

    def __init__(
        self, backend: Backend, source: DrawSource, prepare: Callable[[Sample], None]
    ) -> None:
        self._backend = backend
        self._cache = NodeCache(backend)
        self._source = source
        self._prepare = prepare
        self._segments: list[set[int]] = []  # of each file, by its number
        self._logging = threading.Lock()  # functions draw from threads of their own

    def refresh(self) -> None:
        """Brings the source to the state after the last logged draw."""
        numbers = list_draws(self._backend)
        for seq in numbers[len(self._segments) :]:
            draws = read_draws(self._cache, seq, samples=False)
            self._count(draws)
            if seq == numbers[-1]:
                self._follow(draws)

    def of_segment(self, segment: int, *, samples: bool = True) -> list[Draw]:
        """What is logged for a segment, in order.

        Args:
            samples: without them only ids and states are read.
        """
        found: list[Draw] = []
        for seq in self.files_of(segment):
            draws = read_draws(self._cache, seq, samples=samples)
            found += [draw for draw in draws if draw.segment == segment]
        return found

    def of_groups(self, wanted: Sequence[tuple[int, int]], *, samples: bool = True) -> list[Draw]:
        """The logged draws of (group id, segment that drew it), by group id."""
        ids = {group_id for group_id, _ in wanted}
        segments = sorted({segment for _, segment in wanted})
        drawn = (draw for s in segments for draw in self.of_segment(s, samples=samples))
        found = [draw for draw in drawn if draw.group_id in ids]
        return sorted(found, key=lambda draw: draw.group_id)

    def files_of(self, segment: int) -> list[int]:
        """The log numbers that hold draws of a segment, ascending."""
        return [seq for seq, segments in enumerate(self._segments) if segment in segments]

    def draw(self, segment: int, count: int) -> list[Draw]:
        """Draws for a segment until `count` more of them are logged; returns these.

        Draws of another owner that took our number count as logged. Those for another segment
        only move the source on.
        """
        logged: list[Draw] = []
        while len(logged) < count:
            wanted = count - len(logged)
            logged += self._log(segment, lambda n=wanted: self._source.draw(n))
        return logged

    def claim(self, segment: int, groups: Sequence[Group]) -> list[Draw]:
        """Logs groups that came from elsewhere as draws of a segment, with numbers of their own."""
        found: list[Draw] = []
        while groups and not any(draw.samples is groups[0] for draw in found):
            found = self._log(segment, lambda: self._source.numbered(groups))
        return found

    def _log(self, segment: int, take: Callable[[], list[Taken]]) -> list[Draw]:
        """Logs what `take` gives; returns what stands in the log now for this segment: of another
        owner where that was first."""
        with self._logging:
            return self._log_alone(segment, take)

    def _log_alone(self, segment: int, take: Callable[[], list[Taken]]) -> list[Draw]:
        before = self._source.state()
        try:
            draws = [self._as_logged(item, segment) for item in take()]
            theirs = log_draws(self._backend, len(self._segments), draws)
        except SlimeError:
            self._bring(before)  # what is not logged was not drawn
            raise
        self._count(draws if theirs is None else theirs)
        if theirs is None:
            return draws
        self._follow(theirs)
        return [draw for draw in theirs if draw.segment == segment]

    def _count(self, draws: Sequence[Draw]) -> None:
        self._segments.append({draw.segment for draw in draws})

    def _follow(self, draws: Sequence[Draw]) -> None:
        self._bring(draws[-1].source_state)

    def _bring(self, state: Any) -> None:
        """The source to a state, or, where it has none, to the end of the log."""
        if state is not None:
            self._source.restore(state)
        else:
            self._source.replay(read_draws(self._cache, n) for n in range(len(self._segments)))

    def _as_logged(self, item: Taken, segment: int) -> Draw:
        for sample in item.samples:
            self._prepare(sample)
        return Draw(
            group_id=item.group_index,
            data_epoch=item.data_epoch,
            position=item.position,
            segment=segment,
            samples=item.samples,
            source_state=item.state_after,
        )
