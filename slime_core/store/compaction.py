"""Sealed segments as one compressed file each, instead of many mapped parts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import pyarrow as pa

from slime_core.errors import DigestError, MissingError
from slime_core.store import layout
from slime_core.store.cache import NodeCache
from slime_core.store.columnar import Rows
from slime_core.store.digest import checksum, rows_digest
from slime_core.store.parts import PartFile, serialise
from slime_core.store.schema import PART_SCHEMA, SCHEMA_VERSION
from slime_core.store.seal import Seal, open_groups, read_seal


@dataclass(frozen=True)
class Compacted:
    """One segment before and after."""

    segment: int
    parts: int
    bytes_before: int
    bytes_after: int


def compact_segment(cache: NodeCache, segment: int) -> Compacted | None:
    """Rewrites the groups that a seal lists as one zstd file, then removes the parts.

    The parts go only after the new file was read back and every group's rows have the digest that
    was sealed. A compaction that was cut off leaves both, and is finished by the next one.

    Returns:
        None where the segment has no parts any more, or is not sealed.

    Raises:
        DigestError: what the seal names is gone or damaged; nothing is removed then.
    """
    backend = cache.backend
    seal = read_seal(backend, segment)
    if seal is None:
        return None
    listed = {group.at.key for group in seal.groups}
    parts = [entry for entry in backend.list(layout.segment(segment)) if entry.key in listed]
    if not parts:
        return None
    data = _serialised(cache, seal)
    name = layout.CompactName(segment, checksum(data))
    known = {entry.key for entry in backend.list(layout.segment(segment))}
    if name.key not in known:
        backend.put_new(name.key, memoryview(data))
    _check(name, pa.py_buffer(backend.get(name.key)), seal)
    for part in parts:
        backend.delete(part.key)
        cache.forget(part.key)
    return Compacted(segment, len(parts), sum(part.size_bytes for part in parts), len(data))


def _serialised(cache: NodeCache, seal: Seal) -> pa.Buffer:
    files = open_groups(cache, seal.groups)
    batches, entries = [], []
    for i, group in enumerate(seal.groups):
        file, number = files[group.entry.group_id, group.entry.attempt]
        batches.append(_batch(file.rows(number).rows))
        entries.append(asdict(replace(group.entry, batch=i)))
    schema = batches[0].schema.remove_metadata() if batches else PART_SCHEMA
    about = {"format": "slime-flow part", "version": SCHEMA_VERSION, "segment": seal.segment}
    about |= {"compacted": True, "groups": entries}
    return serialise([b.cast(schema) for b in batches], schema, about, compression="zstd")


def _batch(rows: Rows) -> pa.RecordBatch:
    return rows if isinstance(rows, pa.RecordBatch) else rows.combine_chunks().to_batches()[0]


def _check(name: layout.CompactName, data: pa.Buffer, seal: Seal) -> None:
    file = PartFile(name, data)
    for group in seal.groups:
        held = file.find(group.entry.group_id, group.entry.attempt)
        if held is None:
            raise MissingError(f"{name.key} lacks group {group.entry.group_id}")
        if rows_digest(_batch(file.rows(held.batch).rows)) != group.entry.digest:
            raise DigestError(f"{name.key} holds other rows for group {group.entry.group_id}")
