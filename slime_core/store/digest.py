"""Checksums of files and digests of rows.

The digest of rows depends on what the columns say and on nothing else: neither on how rows are cut
into files and batches, nor on compression, nor on columns that are empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from slime_core.store.schema import MEASURED


def checksum(data: Any) -> str:
    """xxh3-128 (hex) of bytes or anything with the buffer protocol."""
    return xxhash.xxh3_128_hexdigest(memoryview(data))


def checksum_of(pieces: Iterable[Any]) -> str:
    """`checksum` of what pieces are one after another."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(memoryview(piece))
    return state.hexdigest()


def rows_digest(batch: pa.RecordBatch) -> str:
    """sha256 (hex) of the rows of one group, in their order.

    For each column that holds a value, sorted by name and without schema.MEASURED: its name, one
    byte a row that says whether the value is there, then the values that are. Numbers are
    little-endian, booleans one byte, text and lists their lengths (int64) and then their content.
    """
    return group_digests(batch, [batch.num_rows])[0]


def group_digests(batch: pa.RecordBatch, counts: Sequence[int]) -> list[str]:
    """`rows_digest` of each of several groups that lie one after another.

    Args:
        counts: rows of each group; they sum up to the rows of the batch.
    """
    states = [hashlib.sha256() for _ in counts]
    ends = np.cumsum(counts, dtype=np.int64)
    starts = ends - np.asarray(counts, dtype=np.int64)
    for name in sorted(set(batch.schema.names) - MEASURED):
        column = batch.column(name)
        if column.null_count == len(column):
            continue
        held = [
            _Range(state, int(start), int(end))
            for state, start, end in zip(states, starts, ends, strict=True)
            if not column.null_count or column.slice(start, end - start).null_count < end - start
        ]
        for item in held:
            item.state.update(name.encode() + b"\0")
        _feed(column, held)
    return [state.hexdigest() for state in states]


class _Range(NamedTuple):
    """Entries start..end of an array belong to what `state` digests."""

    state: Any
    start: int
    end: int


def _feed(array: pa.Array, ranges: list[_Range]) -> None:
    """Digests the entries of each range: which are there, then their values."""
    if array.null_count:
        valid = array.is_valid().cast(pa.uint8()).to_numpy()
        for state, start, end in ranges:
            state.update(valid[start:end])
        ranges = _moved(ranges, np.concatenate([[0], np.cumsum(valid, dtype=np.int64)]))
        array = array.drop_null()
    else:
        for state, start, end in ranges:
            state.update(b"\1" * (end - start))
    kind = array.type
    if pa.types.is_large_list(kind):
        offsets = _feed_lengths(array, ranges)
        _feed(array.flatten(), _moved(ranges, offsets - offsets[0]))
    elif pa.types.is_struct(kind):
        for child in array.flatten():
            _feed(child, ranges)
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        offsets = _feed_lengths(array, ranges)
        content = memoryview(array.buffers()[2] or b"")
        for state, start, end in _moved(ranges, offsets):
            state.update(content[start:end])
    else:
        if pa.types.is_boolean(kind):
            array = array.cast(pa.uint8())
        values = array.to_numpy()
        for state, start, end in ranges:
            state.update(values[start:end])


def _feed_lengths(array: pa.Array, ranges: list[_Range]) -> np.ndarray:
    """Digests lengths of lists, texts or bytes; returns their offsets, int64 [n + 1]."""
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int64)
    offsets = offsets[array.offset : array.offset + len(array) + 1]
    lengths = np.diff(offsets)
    for state, start, end in ranges:
        state.update(lengths[start:end])
    return offsets


def _moved(ranges: list[_Range], places: np.ndarray) -> list[_Range]:
    """The same ranges in an array where entry i begins at places[i]."""
    return [_Range(state, int(places[start]), int(places[end])) for state, start, end in ranges]
