"""Checksums of files and digests of rows.

The digest of rows depends on what the columns say and on nothing else: neither on how rows are cut
into files and batches, nor on compression, nor on columns that are empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from slime_core.store.schema import MEASURED


def checksum(data: Any) -> str:
    """xxh3-128 (hex) of bytes or anything with the buffer protocol."""
    return xxhash.xxh3_128_hexdigest(memoryview(data))


def rows_digest(batch: pa.RecordBatch) -> str:
    """sha256 (hex) of the rows of one group, in their order.

    For each column that holds a value, sorted by name and without schema.MEASURED: its name, one
    byte a row that says whether the value is there, then the values that are. Numbers are
    little-endian, booleans one byte, text and lists their lengths (int64) and then their content.
    """
    state = hashlib.sha256()
    for name in sorted(set(batch.schema.names) - MEASURED):
        column = batch.column(name)
        if column.null_count == len(column):
            continue
        state.update(name.encode() + b"\0")
        for piece in _pieces(column):
            state.update(piece)
    return state.hexdigest()


def _pieces(array: pa.Array) -> Iterator[Any]:
    if array.null_count:
        yield array.is_valid().cast(pa.uint8()).to_numpy()
        array = array.drop_null()
    else:
        yield b"\1" * len(array)
    kind = array.type
    if pa.types.is_large_list(kind):
        yield _lengths(array)
        yield from _pieces(array.flatten())
    elif pa.types.is_struct(kind):
        for child in array.flatten():
            yield from _pieces(child)
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        lengths = _lengths(array)
        yield lengths
        yield _content(array, lengths)
    elif pa.types.is_boolean(kind):
        yield array.cast(pa.uint8()).to_numpy()
    else:
        yield array.to_numpy()


def _lengths(array: pa.Array) -> np.ndarray:
    """int64 [n]: lengths of lists, texts or bytes."""
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int64)
    return np.diff(offsets[array.offset : array.offset + len(array) + 1])


def _content(array: pa.Array, lengths: np.ndarray) -> Any:
    """All bytes of a text or binary array, one value after another."""
    data = array.buffers()[2]
    total = int(lengths.sum())
    if data is None or not total:
        return b""
    start = int(np.frombuffer(array.buffers()[1], dtype=np.int64)[array.offset])
    return memoryview(data)[start : start + total]
