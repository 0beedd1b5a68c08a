"""The data source that a whole rollout function sees: every group it takes is a logged draw."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slime_core.errors import PluginError
from slime_core.rollout.segment import begin_sample
from slime_core.sample import Sample
from slime_core.store.draws import Draw

Group = list[Sample]
LATE = (
    "this iteration's rollout function has returned, and a thread of it still uses its data "
    "source, so no iteration would know what it draws. Instead leave rollout_function_path unset "
    "and set partial_rollout with over_sampling_batch_size (what is begun goes on in the next "
    "iteration), or name slime.rollout.fully_async_rollout.generate_rollout_fully_async, or end "
    "such threads before returning and take each call's own data_source"
)


class HandedOut:
    """Serves the draws of one segment, then draws further. Safe to call from any thread.

    Args:
        draws: what the segment holds already and has not finished, in order of service.
        prefixes: by group id, what earlier segments kept of some.
        attempts: by group id, which attempt begins now.
        further: logs and returns further draws.
        inner: the user's own data source, whose other names are seen through; None without one.
        length: prompts in one pass.

    Attributes:
        out: draws that were handed out, by group id; `given`: as what; `back`: those given back.
        late: what a thread was told that still drew when the function had returned.
    """

    def __init__(
        self,
        draws: Sequence[Draw],
        prefixes: dict[int, Sequence[Sample]],
        attempts: dict[int, int],
        further: Callable[[int], list[Draw]],
        inner: Any = None,
        length: int = 0,
    ) -> None:
        self._waiting = list(draws)
        self._prefixes = prefixes
        self._attempts = attempts
        self._further = further
        self._inner = inner
        self._length = length
        self._lock = threading.Lock()
        self._closed = False
        self.late: str | None = None
        self.out: dict[int, Draw] = {}
        self.given: dict[int, Group] = {}
        self.back: dict[int, Group] = {}
        self.metadata: dict[str, Any] = {}

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._inner is None:
            raise AttributeError(
                f"the data source of a rollout function has no {name}; it has get_samples, "
                "add_samples, get_buffer_length, get_metadata and update_metadata"
            )
        return getattr(self._inner, name)

    def get_samples(self, num_samples: int) -> list[Group]:
        """The next `num_samples` groups, logged before they are returned.

        Raises:
            PluginError: the iteration's function has returned already.
        """
        with self._lock:
            self._refuse_late()
            draws, self._waiting = self._waiting[:num_samples], self._waiting[num_samples:]
            if len(draws) < num_samples:
                draws += self._further(num_samples - len(draws))
            return [self._begun(draw) for draw in draws]

    def add_samples(self, samples: Iterable[Any]) -> None:
        """Takes back groups that were begun and not finished; they come first next time.

        Raises:
            PluginError: a group that was not taken from here, or the iteration's function has
                returned already.
        """
        with self._lock:
            self._refuse_late()
            for group in grouped(samples):
                number = group[0].group_index
                if number is None or number not in self.out:
                    raise PluginError(
                        f"add_samples was given group {number}, which get_samples did not give in "
                        "this iteration"
                    )
                self.back[number] = group

    def close(self) -> None:
        """From now on nothing is taken: what became of a draw must stand in the seal. Waits for a
        draw that is under way, so it belongs into a thread."""
        self._closed = True
        with self._lock:
            pass

    def get_buffer_length(self) -> int:
        """Groups that wait and were begun before."""
        return len(self._waiting)

    def get_metadata(self) -> dict[str, Any]:
        return self._inner.get_metadata() if self._inner is not None else self.metadata

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        if self._inner is not None:
            self._inner.update_metadata(metadata)
        else:
            self.metadata.update(metadata)

    def save(self, rollout_id: int) -> None:
        """Nothing: the log of draws is the state."""

    def load(self, rollout_id: int | None = None) -> None:
        """Nothing: the log of draws is the state."""

    def attempt_of(self, number: int) -> int:
        """Which attempt at a group this is."""
        prefix = self._prefixes.get(number)
        return prefix[0].attempt if prefix else self._attempts.get(number, 0)

    def _refuse_late(self) -> None:
        if self._closed:
            self.late = LATE
            raise PluginError(LATE)

    def _begun(self, draw: Draw) -> Group:
        self.out[draw.group_id] = draw
        attempt = self.attempt_of(draw.group_id)
        samples = self._prefixes.get(draw.group_id) or draw.samples
        self.given[draw.group_id] = [begin_sample(sample, attempt) for sample in samples]
        return list(self.given[draw.group_id])


def grouped(samples: Iterable[Any]) -> list[Group]:
    """Groups in any nesting as lists of samples; flat samples by their group_index.

    Raises:
        PluginError: something else than samples, or an empty group.
    """
    items = list(samples)
    if items and all(isinstance(item, Sample) for item in items):
        found: dict[Any, Group] = {}
        for place, sample in enumerate(items):
            mark = place if sample.group_index is None else ("group", sample.group_index)
            found.setdefault(mark, []).append(sample)
        return list(found.values())
    groups = [flattened(item) for item in items]
    if not all(groups):
        raise PluginError("a group without samples was given")
    return groups


def flattened(item: Any) -> Group:
    """The samples of a group; lists in it are the rows of one rollout, which share a rollout_id.

    Raises:
        PluginError: it holds something else.
    """
    if isinstance(item, Sample):
        return [item]
    if not isinstance(item, (list, tuple)):
        raise PluginError(f"{item!r:.60} was given as a group; Samples are needed")
    rows: Group = []
    for member in item:
        nested = flattened(member)
        if not isinstance(member, Sample) and len(nested) > 1:
            for row in nested:
                row.rollout_id = id(nested[0]) if row.rollout_id is None else row.rollout_id
        rows += nested
    return rows
