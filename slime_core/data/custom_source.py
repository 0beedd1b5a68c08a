"""Data sources by import path: whatever they give becomes draws of whole groups.

Two forms are known: made with (args), giving groups, and made with (dataset, args), giving one
sample a prompt. Ids are given here, so that a draw has one place in the log of the run.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_core.data.buffer import Select
from slime_core.data.source_classes import (
    Dataset,
    DataSource,
    FlatDataSource,
    FlatDataSourceWithBuffer,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    dataset_at_hand,
)
from slime_core.data.source_state import SourceState
from slime_core.data.sources import Draw, Group
from slime_core.errors import DataError, PluginError, SlimeError
from slime_core.plugins.load import load, source_digest
from slime_core.plugins.user_code import no_exit, raised
from slime_core.refs import digest_of
from slime_core.sample import Sample, Status

OURS = (RolloutDataSource, RolloutDataSourceWithBuffer, FlatDataSource, FlatDataSourceWithBuffer)
_SERVED = "_slime_flow_group"
MOST_ROUNDS = 100


def load_source(path: str) -> type:
    """The class of a path.

    Raises:
        PluginError: it cannot be loaded, is no class, or fits neither form.
    """
    found = load(path)
    if not inspect.isclass(found):
        raise PluginError(
            f"{path} is a {type(found).__name__}; a class with get_samples is needed, named as "
            "file.py:Class or pkg.module.Class"
        )
    if not callable(getattr(found, "get_samples", None)):
        raise PluginError(f"{path} has no method get_samples(num_samples)")
    takes_dataset(found, path)
    return found


def takes_dataset(kind: type, path: str) -> bool:
    """Whether a source is made with (dataset, args), and gives flat lists, or with (args).

    Raises:
        PluginError: with neither.
    """
    try:
        signature = inspect.signature(kind)
    except ValueError:
        return issubclass(kind, FlatDataSource)
    both, alone = (_binds(signature, count) for count in (2, 1))
    if alone and not issubclass(kind, FlatDataSource):
        return False
    if both:
        return True
    raise PluginError(f"{path}{signature} does not fit: it is made with (args) or (dataset, args)")


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


class CustomSource:
    """A user's source as the log of draws sees it.

    Args:
        path: names its class.
        args: the settings.
        dataset: the configured prompts, None without any.
        samples_per_group: n_samples_per_prompt.
    """

    def __init__(
        self, path: str, args: Any, dataset: Dataset | None, samples_per_group: int
    ) -> None:
        self._path = path
        self._args = args
        self._dataset = dataset
        self._size = samples_per_group
        self._class = load_source(path)
        self._flat = takes_dataset(self._class, path)
        self._groups = 0
        self._offered: set[int] = set()
        self._make()

    @property
    def fingerprint(self) -> str:
        """Names the source's code and the files it was given."""
        data = self._dataset.fingerprint if self._dataset is not None else ""
        return digest_of(["data source", self._path, source_digest(self._class), data])

    @property
    def counts(self) -> dict[str, int]:
        """Rows of the files, none where it reads nothing that we know of."""
        return self._dataset.counts if self._dataset is not None else {}

    @property
    def inner(self) -> Any:
        """The user's object."""
        return self._source

    @property
    def keeps_buffer(self) -> bool:
        """Whether it decides itself about what comes back: it has an add_samples of its own."""
        own = getattr(self._class, "add_samples", None)
        return own is not None and own not in [kind.add_samples for kind in (DataSource, *OURS)]

    def select_of(self) -> Select | None:
        """Its own choice among groups that came back: a method `buffer_filter`."""
        method = getattr(self._source, "buffer_filter", None)
        ours = FlatDataSourceWithBuffer.buffer_filter
        if not callable(method) or getattr(self._class, "buffer_filter", None) is ours:
            return None
        return lambda groups, count: self._filtered(method, groups, count)

    def draw(self, count: int) -> list[Draw]:
        """The next `count` groups, with ids of the run.

        Raises:
            PluginError: the source raised, or gave what cannot be used.
        """
        return self.numbered(self._ask(count))

    def offer(self, groups: Mapping[int, Group], count: int) -> tuple[list[int], list[Group]]:
        """Gives back groups that came back (those it was not given yet), then asks for `count`.

        Args:
            groups: by group id.

        Returns:
            Ids of those that it serves now, and the fresh groups that came along.
        """
        new = [i for i in groups if i not in self._offered]
        given = [[_marked(sample, i) for sample in groups[i]] for i in new]
        self._offered |= set(new)
        if given:
            flat = [sample for group in given for sample in group]
            self._call("add_samples", flat if self._flat else given)
        chosen: list[int] = []
        fresh: list[Group] = []
        asked = 0
        while len(chosen) + len(fresh) < count and asked < MOST_ROUNDS:
            asked += 1
            for group in self._ask(count - len(chosen) - len(fresh)):
                number = vars(group[0]).get(_SERVED)
                self._offered.discard(number)
                if number is None:
                    fresh.append(group)
                elif number in groups and number not in chosen:
                    chosen.append(number)
                # others were served before a restart, from which its buffer came back
        return chosen, fresh

    def numbered(self, groups: Sequence[Group]) -> list[Draw]:
        """Groups as draws of the run; the last one has the source's state."""
        draws = []
        for group in groups:
            number = self._groups
            self._groups += 1
            for i, sample in enumerate(group):
                sample.group_index, sample.index = number, number * self._size + i
            draws.append(Draw(0, number, number, group, None))
        return [*draws[:-1], replace(draws[-1], state_after=self.state())] if draws else []

    def state(self) -> dict[str, Any] | None:
        """For `restore`; None where the source has something that cannot be kept."""
        kept = self._state.save()
        if kept is None:
            return None
        offered = sorted(self._offered)
        return {"source": self._path, "groups": self._groups, "kept": kept, "offered": offered}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes back to a saved state.

        Raises:
            PluginError: it was saved by another kind of source.
        """
        if "kept" not in state:
            raise PluginError(
                f"this run drew its prompts without {self._path} before: leave data_source_path "
                "out, or fork the run"
            )
        with dataset_at_hand(self._dataset):
            self._guarded("restored", lambda: self._state.load(state["kept"]))
        self._groups = state["groups"]
        self._offered = set(state["offered"])

    def replay(self, logged: Iterable[Sequence[Any]]) -> None:
        """Brings a new source to its place by drawing again what is logged, file by file.

        Raises:
            PluginError: it gives something else now; names the group.
        """
        self._make()
        for draws in logged:
            got = self._ask(len(draws))
            for draw, group in zip(draws, got, strict=True):
                self._same(draw, group)
                self._groups = max(self._groups, draw.group_id + 1)

    def _make(self) -> None:
        def make() -> Any:
            if self._flat:
                return self._class(self._dataset, self._args)
            return self._class(self._args)

        if self._dataset is not None:
            self._dataset.shuffle(0)  # as it is in a process that begins
        with dataset_at_hand(self._dataset):
            self._source = self._guarded("made", make)
        self._state = SourceState(self._source, self._path)
        self._groups = 0
        self._offered = set()

    def _ask(self, count: int) -> list[Group]:
        if count < 1:
            return []
        found = self._call("get_samples", count)
        if not isinstance(found, (list, tuple)):
            raise PluginError(f"{self._path}: get_samples gave {type(found).__name__}, not a list")
        groups = as_groups(list(found), count, self._size, f"{self._path}: get_samples({count})")
        for group in groups:
            for sample in group:
                if not sample.prompt and not sample.tokens:
                    raise DataError(f"{self._path}: a sample has no prompt")
        return groups

    def _same(self, draw: Any, group: Group) -> None:
        was, now = draw.samples[0], group[0]
        if (was.prompt, was.label) == (now.prompt, now.label):
            return
        what = "prompt" if was.prompt != now.prompt else "label"
        values = repr(getattr(was, what))[:60], repr(getattr(now, what))[:60]
        raise PluginError(
            f"{self._path} cannot go on: the store cannot keep its attribute "
            f"{', '.join(self._state.unsaved) or 'values'}, so it was asked again for all that was "
            f"drawn, and group {draw.group_id} has another {what} now ({values[1]}, it was "
            f"{values[0]}); give it state_dict() and load_state_dict(state)"
        )

    def _filtered(self, method: Callable[..., Any], groups: list[Group], count: int) -> list[Group]:
        """What its buffer_filter picks; in the flat form a group counts with its first sample."""
        if not self._flat:
            return self._guarded("asked for a choice", lambda: method(self._args, groups, count))
        shown = [[copy.copy(sample) for sample in group] for group in groups]
        for sample in (one for group in shown for one in group):
            sample.reward = 0.0 if sample.reward is None else sample.reward
        flat = [sample for group in shown for sample in group]
        of_sample = {id(one): place for place, group in enumerate(shown) for one in group}
        wanted = count * self._size
        picked = self._guarded("asked for a choice", lambda: method(self._args, flat, wanted))
        places = [of_sample.get(id(one)) for one in picked]
        if None in places:
            raise PluginError(f"{self._path}: buffer_filter returned samples that it was not given")
        return [groups[place] for place in dict.fromkeys(p for p in places if p is not None)][
            :count
        ]

    def _call(self, method: str, *given: Any) -> Any:
        with dataset_at_hand(self._dataset):
            return self._guarded(method, lambda: getattr(self._source, method)(*given))

    def _guarded(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            with no_exit(f"{self._path} ({what})"):
                return call()
        except SlimeError:
            raise
        except Exception as error:
            raise PluginError(f"{self._path} ({what}) raised {raised(error)}") from error


def as_groups(found: list[Any], count: int, size: int, name: str) -> list[Group]:
    """What a source gave as `count` groups of `size` samples: groups as they are, or flat samples,
    where each stands for a prompt (or `size` in a row with one group_index for their group).

    Raises:
        PluginError: too few or too many, or groups of another size.
    """
    if found and all(isinstance(item, Sample) for item in found):
        found = _grouped(found, count, size)
    if len(found) != count:
        why = "; a source that ends cannot go on" if len(found) < count else ""
        raise PluginError(f"{name} gave {len(found)} groups{why}")
    groups: list[Group] = []
    for place, group in enumerate(found):
        members = list(group) if isinstance(group, (list, tuple)) else [group]
        if not all(isinstance(sample, Sample) for sample in members):
            raise PluginError(f"{name} gave {group!r:.60} as group {place}; Samples are needed")
        if len(members) != size:
            raise PluginError(
                f"{name} gave {len(members)} samples in group {place}, "
                f"n_samples_per_prompt is {size}"
            )
        for sample in members:
            if sample.status not in (Status.PENDING, Status.ABORTED) and not sample.response_length:
                sample.status = Status.PENDING
        groups.append(members)
    return groups


def _grouped(flat: list[Sample], count: int, size: int) -> list[Group]:
    if len(flat) == count * size and size > 1:
        groups = [flat[i : i + size] for i in range(0, len(flat), size)]
        ids = [{sample.group_index for sample in group} for group in groups]
        if all(len(one) == 1 and None not in one for one in ids):
            return groups
    return [[sample, *(copy.deepcopy(sample) for _ in range(size - 1))] for sample in flat]


def _marked(sample: Sample, number: int) -> Sample:
    """A copy that says which returned group it is of."""
    shown = Sample.from_dict(sample.to_dict())
    setattr(shown, _SERVED, number)
    return shown
