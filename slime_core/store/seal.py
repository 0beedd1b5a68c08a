"""Segments: what is adopted after a crash, and the seal that closes one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import DigestError, MissingError, StoreError
from slime_core.refs import Ref
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.cache import NodeCache
from slime_core.store.documents import Document, Owner, put_document, read_document
from slime_core.store.parts import (
    KEPT,
    GroupEntry,
    Part,
    PartFile,
    Quarantined,
    list_parts,
    open_part,
)
from slime_core.store.schema import SCHEMA_VERSION


@dataclass(frozen=True)
class Location:
    """Where the rows of a group lie: part, record batch, and its bytes in the part."""

    key: str
    batch: int
    start: int
    length: int


@dataclass(frozen=True)
class StoredGroup:
    """One attempt at a group and where it lies."""

    entry: GroupEntry
    at: Location


@dataclass(frozen=True)
class Segment:
    """What the store holds of a segment.

    Attributes:
        segment: its number.
        groups: every attempt once, by (group id, attempt).
        parts: the good parts, by (epoch, seq).
        quarantined: what was moved away because it is damaged.
        doubles: finished groups that were stored again and do not count.
    """

    segment: int
    groups: tuple[StoredGroup, ...]
    parts: tuple[Part, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    doubles: int = 0

    @property
    def finished(self) -> dict[int, StoredGroup]:
        """By group id: the first complete attempt (kept or dropped)."""
        found: dict[int, StoredGroup] = {}
        for group in self.groups:
            if group.entry.complete:
                found.setdefault(group.entry.group_id, group)
        return found

    @property
    def kept(self) -> list[StoredGroup]:
        return [group for group in self.finished.values() if group.entry.verdict == KEPT]

    @property
    def next_attempts(self) -> dict[int, int]:
        """By group id with partial rows and no complete ones: the attempt to begin next."""
        done = self.finished
        return {
            group.entry.group_id: group.entry.attempt + 1
            for group in self.groups
            if group.entry.group_id not in done
        }


@dataclass(frozen=True)
class Seal:
    """A closed segment. `digest` covers what was sealed, not where it lies.

    Attributes:
        draws: first group id begun in it, and the one after the last.
        returned: (group id, segment that drew it) of draws begun here that did not end here; the
            next segment begins with them.
        metrics: what a rollout function reported of the segment.
    """

    segment: int
    digest: str
    parent: str
    draws: tuple[int, int]
    groups: tuple[StoredGroup, ...]
    rows: int
    rollouts: int
    tokens: int
    counts: dict[str, int]
    found: bool = False
    returned: tuple[tuple[int, int], ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)

    def as_segment(self) -> Segment:
        return Segment(self.segment, self.groups)

    def ref(self) -> Ref:
        return Ref(
            layout.seal(self.segment), "seal", self.segment, self.rows, self.tokens, self.digest,
            self.found,
        )  # fmt: skip


def adopt(cache: NodeCache, segment: int) -> Segment:
    """Finds the finished groups of a segment that is not sealed.

    Damaged parts go to quarantine: their groups count as not generated. Of a group that was stored
    more than once the lowest (epoch, seq) counts, complete rows before partial ones.
    """
    files, quarantined = list_parts(cache, segment)
    best: dict[tuple[int, int], StoredGroup] = {}
    doubles = 0
    for file in files:
        ranges, key = file.byte_ranges(), file.part.key
        for entry in file.part.groups:
            group = StoredGroup(entry, Location(key, entry.batch, *ranges[entry.batch]))
            known = best.setdefault((entry.group_id, entry.attempt), group)
            if known is group:
                continue
            doubles += 1
            if entry.complete and not known.entry.complete:
                best[entry.group_id, entry.attempt] = group
    groups = tuple(best[key] for key in sorted(best))
    parts = tuple(file.part for file in files)
    return Segment(segment, groups, parts, tuple(quarantined), doubles)


def put_seal(
    backend: Backend,
    owner: Owner,
    segment: Segment,
    *,
    parent: str,
    draws: tuple[int, int],
    tokenizer_digest: str,
    returned: Sequence[tuple[int, int]] = (),
    metrics: dict[str, float] | None = None,
    by: dict[str, Any] | None = None,
) -> Seal:
    """Closes a segment.

    Args:
        segment: what `adopt` found.
        parent: digest of the seal before, "" for the first.
        draws: first group id begun in this segment, and the one after the last.
        tokenizer_digest: what the token ids mean.
        returned: (group id, segment that drew it) of what the next segment begins with.
        metrics: of the segment, by full name.

    Raises:
        StaleOwnerError: another owner sealed something else, or owns the run.
    """
    entries = [group.entry for group in segment.groups]
    counts = Counter(e.verdict if e.reason is None else f"{e.verdict}:{e.reason}" for e in entries)
    body = {
        "segment": segment.segment,
        "schema": SCHEMA_VERSION,
        "parent": parent,
        "tokenizer": tokenizer_digest,
        "draws": list(draws),
        "groups": [
            [e.group_id, e.attempt, e.verdict, e.reason, e.rows, e.rollouts, e.tokens, e.digest]
            for e in entries
        ],
        "rows": sum(e.rows for e in entries),
        "rollouts": sum(e.rollouts for e in entries),
        "tokens": sum(e.tokens for e in entries),
        "counts": dict(counts),
    }
    if returned:
        body["returned"] = [list(item) for item in returned]
    if metrics:
        body["metrics"] = metrics
    used = [part for part in segment.parts if part.key in {g.at.key for g in segment.groups}]
    number = {part.key: i for i, part in enumerate(used)}
    about = {
        **(by or {}),
        "parts": [[p.key, p.rows, p.tokens, p.size_bytes, p.name.checksum] for p in used],
        "index": [[number[g.at.key], g.at.batch, g.at.start, g.at.length] for g in segment.groups],
        "quarantined": [bad.key for bad in segment.quarantined],
        "doubles": segment.doubles,
    }
    key = layout.seal(segment.segment)
    return _seal(put_document(backend, key, body, about, owner=owner))


def read_seal(backend: Backend, segment: int) -> Seal | None:
    """The seal of a segment, None while it is open. Raises DigestError if it is damaged."""
    try:
        return _seal(read_document(backend, layout.seal(segment)))
    except MissingError:
        return None


Listed = dict[str, dict[tuple[int, int], str]]
"""By part: (group id, attempt) -> digest of the rows, of what a seal lists."""


def read_listed(backend: Backend, segment: int) -> tuple[str, Listed]:
    """The digest of a seal and its groups, for who goes through all seals of a run.

    Raises:
        MissingError: the segment is not sealed.
        DigestError: the seal is damaged.
    """
    document = read_document(backend, layout.seal(segment))
    listed: list[dict[tuple[int, int], str]] = [{} for _ in document.by["parts"]]
    for row, at in zip(document.body["groups"], document.by["index"], strict=True):
        listed[at[0]][row[0], row[1]] = row[-1]
    keys = [part[0] for part in document.by["parts"]]
    return document.digest, dict(zip(keys, listed, strict=True))


def list_seals(backend: Backend) -> list[int]:
    """Sealed segments, ascending."""
    found = [layout.parse_seal(entry.key) for entry in backend.list(layout.GROUPS)]
    return sorted(segment for segment in found if segment is not None)


def list_dropped(backend: Backend) -> set[int]:
    """Sealed segments whose rows were given up."""
    found = (layout.parse_dropped(entry.key) for entry in backend.list(layout.GROUPS))
    return {segment for segment in found if segment is not None}


def open_groups(
    cache: NodeCache, groups: Sequence[StoredGroup]
) -> dict[tuple[int, int], tuple[PartFile, int]]:
    """Opens the parts that hold these groups, or the compacted segments in their place.

    Returns:
        (group id, attempt) -> (open part, record batch).

    Raises:
        DigestError: a part is damaged or gone, or holds something else than was sealed.
    """
    files: dict[str, PartFile] = {}
    compacted: dict[str, PartFile] = {}
    found = {}
    for group in groups:
        key = group.at.key
        if key not in files:
            try:
                files[key] = open_part(cache, key)
            except MissingError:
                folder = key.rpartition("/")[0]
                if folder not in compacted:
                    compacted[folder] = _open_compacted(cache, key)
                files[key] = compacted[folder]
        held = files[key].find(group.entry.group_id, group.entry.attempt)
        if held is None or held.digest != group.entry.digest:
            raise StoreError(f"{key} holds other rows for group {group.entry.group_id}")
        found[group.entry.group_id, group.entry.attempt] = (files[key], held.batch)
    return found


def open_compacted(cache: NodeCache, keys: Sequence[str]) -> list[PartFile]:
    """The good ones of a segment's compacted files, those that lost the fewest planes first.

    Raises:
        DigestError: all are damaged; says so of the first.
    """
    good, bad = list[PartFile](), list[DigestError]()
    for key in keys:
        try:
            good.append(open_part(cache, key))
        except DigestError as error:
            bad.append(error)
    if not good:
        raise bad[0]
    return sorted(good, key=lambda file: file.planes_lost)


def _open_compacted(cache: NodeCache, missing: str) -> PartFile:
    """The file that a segment's parts were put together in; a compaction that was cut off leaves
    two of them."""
    folder = missing.rpartition("/")[0]
    keys = [entry.key for entry in cache.backend.list(f"{folder}/")]
    compacted = [key for key in keys if layout.parse_compact(key) is not None]
    if compacted:
        return open_compacted(cache, compacted)[0]
    if any(layout.parse_dropped(key) is not None for key in keys):
        raise DigestError(f"the rows of {folder} were dropped, as its retention asked for")
    raise DigestError(f"{missing} is gone, but a seal needs it")


def _seal(document: Document) -> Seal:
    body, by = document.body, document.by
    groups = []
    for fields, (part, batch, start, length) in zip(body["groups"], by["index"], strict=True):
        entry = GroupEntry(*fields, batch=batch)
        groups.append(StoredGroup(entry, Location(by["parts"][part][0], batch, start, length)))
    return Seal(
        segment=body["segment"],
        digest=document.digest,
        parent=body["parent"],
        draws=(body["draws"][0], body["draws"][1]),
        groups=tuple(groups),
        rows=body["rows"],
        rollouts=body["rollouts"],
        tokens=body["tokens"],
        counts=body["counts"],
        found=document.found,
        returned=tuple((group, drawn) for group, drawn in body.get("returned", [])),
        metrics=body.get("metrics", {}),
    )
