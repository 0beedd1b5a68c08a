"""What of a run may go, and the taking away of it.

Documents, draws and configurations always stay: they are small and tell the history. Rows may go
once no resume can need them; files that nothing names may always go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_core.errors import DigestError
from slime_core.run.frontier import GroupLog
from slime_core.run.history import read_history
from slime_core.run.plan import History, plan
from slime_core.store import layout
from slime_core.store.backend import Backend, Entry
from slime_core.store.cache import NodeCache
from slime_core.store.documents import Owner, put_document
from slime_core.store.ledger import read_ledger
from slime_core.store.seal import list_dropped, open_compacted

SAFE_CHECKPOINTS = 2
"""A resume may find the newest checkpoint damaged; rows that the one before needs stay, too."""
_LEFT_BEHIND = ("probe-", "create-")


@dataclass(frozen=True)
class Retention:
    """Whose rows are kept. With neither number all are; a segment stays if either says so.

    Attributes:
        last: the newest so many sealed segments.
        every: each segment whose number is a multiple of this.
    """

    last: int | None = None
    every: int | None = None

    def keeps(self, segment: int, newest: int) -> bool:
        if self.last is None and self.every is None:
            return True
        return (self.last is not None and segment > newest - self.last) or (
            self.every is not None and segment % self.every == 0
        )


@dataclass(frozen=True)
class Garbage:
    """What may go.

    Attributes:
        segments: whose rows the retention gives up.
        objects: everything to delete, the rows of `segments` included.
    """

    segments: tuple[int, ...]
    objects: tuple[Entry, ...]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.objects)


def find_garbage(cache: NodeCache, retention: Retention, *, quarantined: bool = False) -> Garbage:
    """Looks for what no seal, batch, ledger, checkpoint or resume needs. Deletes nothing; as in
    every reading of a history, damaged parts of an open segment go to quarantine.

    Args:
        quarantined: damaged objects that were set aside may go, too.
    """
    entries = cache.backend.list()
    history = _history(cache)
    droppable = _droppable(history)
    newest = max(history.seals, default=-1)
    dropped = tuple(s for s in droppable if not retention.keeps(s, newest))
    needed = _needed_parts(history)
    kept = _kept_compactions(cache, entries)
    objects = []
    for entry in entries:
        part, compact = layout.parse_part(entry.key), layout.parse_compact(entry.key)
        if part is not None and part.segment in history.seals:
            useless = part.segment in dropped or entry.key not in needed
        elif compact is not None:
            useless = compact.segment in dropped or entry.key not in kept
        elif (segment := layout.parse_turn(entry.key)) is not None:
            useless = segment in history.seals
        else:
            useless = _left_behind(entry.key, quarantined)
        if useless:
            objects.append(entry)
    gone = {layout.parse_dropped(entry.key) for entry in entries}
    return Garbage(tuple(s for s in dropped if s not in gone), tuple(objects))


def settled_segments(cache: NodeCache, keep_last: int = 0) -> list[int]:
    """Sealed segments whose rows are there and that no resume needs.

    Args:
        keep_last: leave out the newest so many sealed segments.
    """
    history = _history(cache)
    newest, gone = max(history.seals, default=-1), list_dropped(cache.backend)
    return [s for s in _droppable(history) if s not in gone and s <= newest - keep_last]


def collect(backend: Backend, owner: Owner, garbage: Garbage) -> None:
    """Deletes garbage. Each segment is marked as dropped before its rows go.

    Args:
        owner: of the run, so that nobody trains it meanwhile.

    Raises:
        StaleOwnerError: another owner has the run.
    """
    for segment in garbage.segments:
        put_document(backend, layout.dropped(segment), {"segment": segment}, owner=owner)
    owner.guard()
    for entry in garbage.objects:
        backend.delete(entry.key)


def _history(cache: NodeCache) -> History:
    first = read_ledger(cache.backend, 0)
    return read_history(cache, "" if first is None else first.parent)


def _droppable(history: History) -> list[int]:
    """Sealed segments whose rows no resume needs: every group of them is decided, and what was
    trained is contained in the newest checkpoints."""
    steps = plan(history, num_rollout=0)
    if len(steps.checkpoints) < SAFE_CHECKPOINTS:
        return []
    safe = steps.checkpoints[SAFE_CHECKPOINTS - 1].iteration
    wanted = _undecided(steps.log, history)
    for k, batch in history.batches.items():
        if k > safe:
            wanted |= {group.segment for group in batch.content.groups}
    return [segment for segment in sorted(history.seals) if segment not in wanted]


def _undecided(log: GroupLog, history: History) -> set[int]:
    """Segments with a finished group that may still be trained, or with a part of one that is
    generated on."""
    unfinished = {state.group_id for state in log.open_groups()}
    partial = {
        segment
        for segment, seal in history.seals.items()
        if any(group.entry.group_id in unfinished for group in seal.groups)
    }
    return {state.segment for state in log.ready_groups()} | partial


def _needed_parts(history: History) -> set[str]:
    return {group.at.key for seal in history.seals.values() for group in seal.groups}


def _kept_compactions(cache: NodeCache, entries: Sequence[Entry]) -> set[str]:
    """The compacted file of each segment. Of two, which one that was cut off leaves, it is a good
    one that lost nothing that the other has; none goes where all are damaged."""
    found: dict[int, list[str]] = {}
    for entry in entries:
        if (compact := layout.parse_compact(entry.key)) is not None:
            found.setdefault(compact.segment, []).append(entry.key)
    kept = set[str]()
    for keys in found.values():
        try:
            kept |= {open_compacted(cache, keys)[0].part.key} if len(keys) > 1 else {*keys}
        except DigestError:
            kept |= {*keys}
    return kept


def _left_behind(key: str, quarantined: bool) -> bool:
    if key.startswith(layout.QUARANTINE):
        return quarantined
    name = key.removeprefix(layout.EPOCHS)
    return name != key and name.startswith(_LEFT_BEHIND)
