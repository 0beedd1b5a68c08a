"""Which groups that came back a segment begins with: chosen once, and kept in the store.

Without a filter all of them begin. With one (buffer_filter_path, or a data source of one's own) the
choice stands in `groups/<segment>/returned.json` before anything of it is begun, so that a resumed
run goes on with the same groups, whatever the filter looks at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_core.data.buffer import FILTERS, GroupBuffer, Select, filter_of_user
from slime_core.data.sources import Group
from slime_core.errors import MissingError, PluginError, SlimeError
from slime_core.plugins.load import check_signature, load
from slime_core.plugins.user_code import no_exit, raised
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.documents import Owner, put_document, read_document
from slime_core.store.seal import Seal

Returned = tuple[tuple[int, int], ...]
"""(group id, segment that drew it) of each."""


@dataclass(frozen=True)
class Choice:
    """What becomes of the groups that came back.

    Attributes:
        begun: these begin in this segment.
        waiting: these wait for a later one.
        dropped: a filter took them out of its buffer without returning them; they are given up.
    """

    begun: Returned = ()
    waiting: Returned = ()
    dropped: Returned = ()

    @property
    def body(self) -> dict[str, list[list[int]]]:
        names = ("begun", "waiting", "dropped")
        return {name: [list(item) for item in getattr(self, name)] for name in names}


def read_choice(backend: Backend, segment: int, before: Seal | None) -> Choice | None:
    """The choice of a segment as it is stored; None where none was made."""
    if before is None or not before.returned:
        return Choice()
    try:
        body = read_document(backend, layout.returned(segment)).body
    except MissingError:
        return None
    names = ("begun", "waiting", "dropped")
    return Choice(*(tuple((g, s) for g, s in body[name]) for name in names))


def commit_choice(
    backend: Backend, owner: Owner, segment: int, before: Seal, begun: Sequence[int],
    dropped: Sequence[int] = (),
) -> Choice:  # fmt: skip
    """Stores the choice of a segment.

    Args:
        begun: ids of groups that begin, in their order.
        dropped: ids of groups that are given up.
    """
    drawn = dict(before.returned)
    gone = {*begun, *dropped}
    choice = Choice(
        tuple((group, drawn[group]) for group in begun),
        tuple((group, segment_) for group, segment_ in before.returned if group not in gone),
        tuple((group, drawn[group]) for group in dropped),
    )
    put_document(backend, layout.returned(segment), choice.body, owner=owner)
    return choice


def selected(
    select: Select, groups: Mapping[int, Group], count: int
) -> tuple[list[int], list[int]]:
    """Ids of the groups that a filter picks, and of those that it gave up.

    Raises:
        PluginError: it raised, or picked what it was not given.
    """
    number_of = {id(group): number for number, group in groups.items()}
    buffer = GroupBuffer(None, select)
    buffer.add_samples(groups.values())
    try:
        with no_exit("the buffer filter"):
            picked = [number_of[id(group)] for group in buffer.take(count)]
    except SlimeError:
        raise
    except Exception as error:
        raise PluginError(f"the buffer filter raised {raised(error)}") from error
    left = {number_of[id(group)] for group in buffer.groups}
    return picked, [number for number in groups if number not in left and number not in picked]


def load_buffer_filter(path: str | None, args: object) -> Select | None:
    """The filter of a path, None without one.

    Raises:
        PluginError: it cannot be loaded, or called as `filter(args, rollout_id, buffer,
            num_samples)` or `filter(args, buffer, num_samples)`.
    """
    if not path:
        return None
    if path in FILTERS:
        return FILTERS[path]
    if path == "slime.rollout.data_source.pop_first":
        return FILTERS["fifo"]
    function = load(path)
    short = ("args", "buffer", "num_samples")
    try:
        check_signature(function, path, ("args", "rollout_id", *short[1:]), must_be_plain=True)
    except PluginError:
        check_signature(function, path, short, must_be_plain=True)
    return filter_of_user(function, args)
