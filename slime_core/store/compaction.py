"""Sealed segments as one compressed file each, instead of many mapped parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace

import pyarrow as pa

from slime_core.errors import DigestError, MissingError
from slime_core.store import layout
from slime_core.store.cache import NodeCache
from slime_core.store.columnar import Rows
from slime_core.store.digest import checksum, rows_digest
from slime_core.store.parts import PartFile, serialise
from slime_core.store.planes import without
from slime_core.store.schema import PART_SCHEMA, SCHEMA_VERSION
from slime_core.store.seal import Seal, StoredGroup, open_groups, read_seal


@dataclass(frozen=True)
class Compacted:
    """One segment before and after."""

    segment: int
    parts: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class _Left:
    """What a compaction keeps of one group.

    Attributes:
        lost: planes that went, now or before.
        digest: of these rows.
        changed: a plane goes now.
    """

    group: StoredGroup
    rows: pa.RecordBatch
    lost: frozenset[str]
    digest: str
    changed: bool


def compact_segment(cache: NodeCache, segment: int, drop: Collection[str] = ()) -> Compacted | None:
    """Rewrites the groups that a seal lists as one zstd file, then removes the parts.

    The parts go only after the new file was read back and every group's rows have the digest that
    was sealed. A compaction that was cut off leaves both, and is finished by the next one.

    Args:
        drop: planes whose columns are emptied, also of a segment that was compacted before. A
            segment whose rows have none of them is left as it is.

    Returns:
        None where there is nothing to do, or the segment is not sealed.

    Raises:
        DigestError: what the seal names is gone or damaged; nothing is removed then.
    """
    backend = cache.backend
    seal = read_seal(backend, segment)
    if seal is None:
        return None
    listed = {group.at.key for group in seal.groups}
    entries = backend.list(layout.segment(segment))
    parts = [entry for entry in entries if entry.key in listed]
    compacted = [entry for entry in entries if drop and layout.parse_compact(entry.key)]
    if not parts and not compacted:
        return None
    left = _left(cache, seal, drop)
    if (drop or not parts) and not any(one.changed for one in left):
        return None
    data = _serialised(segment, left)
    name = layout.CompactName(segment, checksum(data))
    there = name.key in {entry.key for entry in entries}
    if there and checksum(backend.get(name.key)) != name.checksum:
        backend.delete(name.key)  # half a file, of a machine that went down in mid compaction
        cache.forget(name.key)
        there = False
    if not there:
        backend.put_new(name.key, memoryview(data))
    _check(name, pa.py_buffer(backend.get(name.key)), left)
    old = [entry for entry in (*parts, *compacted) if entry.key != name.key]
    for entry in old:
        backend.delete(entry.key)
        cache.forget(entry.key)
    return Compacted(segment, len(parts), sum(entry.size_bytes for entry in old), len(data))


def lost_planes(cache: NodeCache, segment: int) -> frozenset[str]:
    """Planes that some row of a sealed segment had and that were given up."""
    if not any(layout.parse_compact(e.key) for e in cache.backend.list(layout.segment(segment))):
        return frozenset()
    seal = read_seal(cache.backend, segment)
    files = open_groups(cache, () if seal is None else seal.groups)
    return frozenset[str]().union(*(file.lost(number) for file, number in files.values()))


def holds_planes(cache: NodeCache, segment: int, planes: Collection[str]) -> bool:
    """Whether `compact_segment` would empty columns of these planes."""
    seal = read_seal(cache.backend, segment)
    files = open_groups(cache, () if seal is None else seal.groups)
    return any(without(_batch(file.rows(i).rows), planes)[1] for file, i in files.values())


def _left(cache: NodeCache, seal: Seal, drop: Collection[str]) -> list[_Left]:
    """What is kept of each group, in the seal's order. Rows that lose a plane are checked first:
    afterwards the sealed digest says nothing about them."""
    files = open_groups(cache, seal.groups)
    found = []
    for group in seal.groups:
        file, number = files[group.entry.group_id, group.entry.attempt]
        whole, digest = _batch(file.rows(number).rows), file.digest_of(number)
        rows, held = without(whole, drop)
        if held:
            if rows_digest(whole) != digest:
                raise DigestError(f"{group.at.key}: other rows in group {group.entry.group_id}")
            digest = rows_digest(rows)
        found.append(_Left(group, rows, file.lost(number) | held, digest, bool(held)))
    return found


def _serialised(segment: int, left: Sequence[_Left]) -> pa.Buffer:
    schema = left[0].rows.schema.remove_metadata() if left else PART_SCHEMA
    about = {"format": "slime-flow part", "version": SCHEMA_VERSION, "segment": segment}
    entries = [asdict(replace(one.group.entry, batch=i)) for i, one in enumerate(left)]
    about |= {"compacted": True, "groups": entries}
    lost = {
        str(i): {"planes": sorted(one.lost), "left": one.digest}
        for i, one in enumerate(left)
        if one.lost
    }
    if lost:
        about["lost"] = lost
    return serialise([one.rows.cast(schema) for one in left], schema, about, compression="zstd")


def _batch(rows: Rows) -> pa.RecordBatch:
    return rows if isinstance(rows, pa.RecordBatch) else rows.combine_chunks().to_batches()[0]


def _check(name: layout.CompactName, data: pa.Buffer, left: Sequence[_Left]) -> None:
    file = PartFile(name, data)
    for one in left:
        entry = one.group.entry
        held = file.find(entry.group_id, entry.attempt)
        if held is None:
            raise MissingError(f"{name.key} lacks group {entry.group_id}")
        if rows_digest(_batch(file.rows(held.batch).rows)) != one.digest:
            raise DigestError(f"{name.key} holds other rows for group {entry.group_id}")
