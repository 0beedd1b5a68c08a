"""Groups that came back (aborted, or put back by a plug-in), served before fresh prompts.

What comes back lives in the run's group log, so this buffer holds nothing that a restart could
lose: it is filled from the log again.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from slime_core.data.sources import Group
from slime_core.errors import PluginError
from slime_core.sample import Status

Select = Callable[[list[Group], int], list[Group]]
UNUSABLE = (Status.FAILED,)


class Source(Protocol):
    """What a buffer asks for fresh groups."""

    def get_samples(self, num_samples: int) -> list[Group]: ...


class GroupBuffer:
    """Serves returned groups first, then fresh ones.

    Attributes:
        groups: what waits, in the order of return.
    """

    def __init__(self, source: Source | None, select: Select | None = None) -> None:
        """
        Args:
            source: gives fresh groups; None where nobody asks for any.
            select: picks at most n of the waiting groups; by default the oldest.
        """
        self.groups: list[Group] = []
        self._source = source
        self._select = select or fifo

    def __len__(self) -> int:
        return len(self.groups)

    def add_samples(self, samples: Iterable[Group]) -> None:
        """Puts groups back."""
        self.groups.extend(samples)

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups. What the selection returns leaves the buffer."""
        picked = self.take(num_samples)
        assert self._source is not None
        return picked + self._source.get_samples(num_samples - len(picked))

    def take(self, num_samples: int) -> list[Group]:
        """At most `num_samples` waiting groups.

        Raises:
            PluginError: the selection returned too many, or groups that do not wait here.
        """
        if not self.groups or num_samples <= 0:
            return []
        waiting = list(self.groups)
        picked = list(self._select(self.groups, num_samples))
        known = {id(group) for group in waiting}
        if len(picked) > num_samples or any(id(group) not in known for group in picked):
            raise PluginError(
                f"the buffer filter returned {len(picked)} groups for {num_samples}; it must pick "
                "from the groups it was given"
            )
        gone = {id(group) for group in picked}
        # A filter may have removed more than it returned: those groups are dropped by its wish.
        left = {id(group) for group in self.groups} - gone
        self.groups[:] = [group for group in waiting if id(group) in left]
        return picked


def filter_of_user(function: Callable[..., Any], args: Any) -> Select:
    """A slime buffer filter as a selection.

    Args:
        function: `(args, buffer, num_samples)`, or `(args, rollout_id, buffer, num_samples)` as
            upstream has it, with None for the iteration.
        args: its first argument.
    """
    names = list(inspect.signature(function).parameters)
    if len(names) >= 4 and names[1] != "buffer":
        return lambda buffer, count: function(args, None, buffer, count)
    return lambda buffer, count: function(args, buffer, count)


def fifo(buffer: list[Group], count: int) -> list[Group]:
    """The oldest groups."""
    return buffer[:count]


def prioritized(buffer: list[Group], count: int) -> list[Group]:
    """The groups of highest mean reward; unscored ones last, the older first among equals."""
    return sorted(buffer, key=lambda group: -mean_reward(group))[:count]


def quality(buffer: list[Group], count: int) -> list[Group]:
    """The oldest groups without a failed or removed member; others are dropped for good."""
    buffer[:] = [group for group in buffer if is_usable(group)]
    return buffer[:count]


def stratified(buffer: list[Group], count: int) -> list[Group]:
    """Groups in turn from the unsolved, the partly solved and the solved, the oldest of each."""
    strata: list[list[Group]] = [[], [], []]
    for group in buffer:
        mean = mean_reward(group)
        strata[0 if mean <= 0 else 1 if mean < 1 else 2].append(group)
    picked: list[Group] = []
    while len(picked) < count and any(strata):
        picked += [stratum.pop(0) for stratum in strata if stratum][: count - len(picked)]
    return picked


def diversity(buffer: list[Group], count: int) -> list[Group]:
    """The oldest group of each prompt first, then the second of each, and so on."""
    seen: dict[str, int] = {}
    order: list[tuple[int, int]] = []
    for place, group in enumerate(buffer):
        prompt = repr(group[0].prompt) if group else ""
        order.append((seen.get(prompt, 0), place))
        seen[prompt] = seen.get(prompt, 0) + 1
    return [buffer[place] for _, place in sorted(order)[:count]]


FILTERS: dict[str, Select] = {
    "fifo": fifo,
    "prioritized": prioritized,
    "quality": quality,
    "stratified": stratified,
    "diversity": diversity,
}


def mean_reward(group: Sequence[Any]) -> float:
    """Mean of the plain rewards of a group; minus infinity where it has none."""
    rewards = [sample.reward for sample in group if isinstance(sample.reward, (int, float))]
    return statistics.fmean(rewards) if rewards else float("-inf")


def is_usable(group: Sequence[Any]) -> bool:
    """Whether no member has failed or been removed."""
    return not any(sample.remove_sample or sample.status in UNUSABLE for sample in group)
