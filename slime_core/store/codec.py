"""Samples to Arrow rows and back, without loss."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from slime_core.errors import DataError
from slime_core.sample import FIELD_NAMES, PrefixCacheInfo, Sample, Span, SpecInfo, Status
from slime_core.store.schema import (
    DRAWS_SCHEMA,
    PART_SCHEMA,
    SAMPLE_COLUMNS,
    SAMPLE_SCHEMA,
    SPAN,
    TEXT,
    Column,
)
from slime_core.store.values import from_json, to_json

Rows: TypeAlias = pa.RecordBatch | pa.Table
_REFUSED = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError, TypeError)
_SPEC = tuple(item.name for item in fields(SpecInfo))
_PREFIX = tuple(item.name for item in fields(PrefixCacheInfo))
_ROW_COLUMNS = {*PART_SCHEMA.names, *DRAWS_SCHEMA.names} - set(SAMPLE_SCHEMA.names)
_PLAIN = tuple(column for column in SAMPLE_COLUMNS if column.how == "plain")
_LISTS = tuple(column for column in SAMPLE_COLUMNS if column.how == "list")
_JSON = tuple(column for column in SAMPLE_COLUMNS if column.how == "json")
_BY_NAME = {column.name: column for column in SAMPLE_COLUMNS}


def encode_samples(samples: Sequence[Sample]) -> dict[str, pa.Array]:
    """One Arrow array for each column of SAMPLE_SCHEMA, one entry a sample.

    Raises:
        DataError: a value that cannot be kept, named with its sample and field.
    """
    rows = [vars(sample) for sample in samples]
    extra = [
        {}
        if len(row) == len(FIELD_NAMES)
        else {k: v for k, v in row.items() if k not in FIELD_NAMES}
        for row in rows
    ]
    arrays: dict[str, pa.Array] = {}
    for column in _PLAIN:
        arrays[column.name] = _plain(column, [row[column.name] for row in rows], extra)
    for column in _LISTS:
        arrays[column.name] = _numbers(column, [row[column.name] for row in rows], rows)
    for column in _JSON:
        texts = [_json(row[column.name], column.name, row) for row in rows]
        arrays[column.name] = pa.array(texts, TEXT)
    arrays |= _encode_prompt(rows, extra)
    arrays |= _encode_reward(rows, extra)
    arrays |= _encode_experts(rows)
    arrays["spans"] = _encode_spans(rows)
    arrays["status"] = pa.array([_status(row) for row in rows], TEXT)
    for names, part in ((_SPEC, "spec_info"), (_PREFIX, "prefix_cache_info")):
        for name in names:
            column = _BY_NAME[name]
            arrays[name] = pa.array([getattr(row[part], name) for row in rows], column.type)
    texts = [
        to_json(e, f"attribute of {_name(row)}") if e else None
        for e, row in zip(extra, rows, strict=True)
    ]
    arrays["extra"] = pa.array(texts, TEXT)
    return arrays


def samples_to_rows(samples: Sequence[Sample]) -> pa.RecordBatch:
    """A record batch of SAMPLE_SCHEMA."""
    arrays = encode_samples(samples)
    return pa.RecordBatch.from_arrays(
        [arrays[name] for name in SAMPLE_SCHEMA.names], schema=SAMPLE_SCHEMA
    )


def decode_samples(rows: Rows) -> list[Sample]:
    """The samples of a record batch or table; per-token fields come back as lists.

    Columns that an older writer did not know give the field's default; unknown ones become
    attributes.
    """
    columns = {name: rows.column(name) for name in rows.schema.names if name not in _ROW_COLUMNS}
    values = {name: _to_list(column) for name, column in columns.items()}
    return [_decode_row(values, i) for i in range(rows.num_rows)]


def _decode_row(values: dict[str, list[Any]], i: int) -> Sample:
    """Columns that are there decide, null is None; fields without a column keep their default."""
    row = {name: column[i] for name, column in values.items()}
    known = {c.name: row[c.name] for c in (*_PLAIN, *_LISTS) if c.name in row}
    known |= {c.name: _from_json(row[c.name]) for c in _JSON if c.name in row}
    for name, other in (("prompt", "prompt_messages"), ("reward", "reward_values")):
        if name in row or other in row:
            text = row.get(other)
            known[name] = row.get(name) if text is None else from_json(text)
    if row.get("spans") is not None:
        known["spans"] = [Span(**span) for span in row["spans"]]
    if row.get("status") is not None:
        known["status"] = Status(row["status"])
    known["rollout_routed_experts"] = _decode_experts(row)
    known["spec_info"] = SpecInfo(**{name: row.get(name) or 0 for name in _SPEC})
    known["prefix_cache_info"] = PrefixCacheInfo(**{name: row.get(name) or 0 for name in _PREFIX})
    sample = Sample(**known)
    later = {name: row[name] for name in row if name not in _BY_NAME and row[name] is not None}
    for name, value in (later | from_json(row.get("extra") or "{}")).items():
        sample.__dict__[name] = value
    return sample


def _from_json(text: str | None) -> Any:
    return None if text is None else from_json(text)


def _to_list(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Python values; number lists by way of numpy, which is several times faster."""
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in _to_list(chunk)]
    if not pa.types.is_large_list(column.type) or not pa.types.is_primitive(column.type.value_type):
        return column.to_pylist()
    flat = column.values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_pylist()
    valid = column.is_valid().to_pylist()
    return [
        flat[offsets[i] : offsets[i + 1]].tolist() if valid[i] else None for i in range(len(column))
    ]


def _name(row: dict[str, Any]) -> str:
    return f"sample {row['index']} of group {row['group_index']}"


def _fits(value: Any, column: Column) -> bool:
    if value is None:
        return True
    if column.type == TEXT and not isinstance(value, str):
        return False
    try:
        pa.array([value], column.type)
    except _REFUSED:
        return False
    return True


def _plain(column: Column, values: list[Any], extra: list[dict[str, Any]]) -> pa.Array:
    """Arrow's conversion; what it refuses goes to `extra` instead."""
    if all(value is None for value in values):
        return pa.nulls(len(values), column.type)
    try:
        if column.type != TEXT or all(v is None or isinstance(v, str) for v in values):
            return pa.array(values, column.type)
    except _REFUSED:
        pass  # at least one value does not fit: looked for one by one below
    kept = list(values)
    for i, value in enumerate(values):
        if not _fits(value, column):
            extra[i][column.name] = value
            kept[i] = None
    return pa.array(kept, column.type)


def _numbers(column: Column, values: list[Any], rows: list[dict[str, Any]]) -> pa.Array:
    """Lists of numbers, packed a list at a time: a third of the time Arrow takes for lists."""
    missing = [value is None for value in values]
    if all(missing):
        return pa.nulls(len(values), column.type)
    dtype = np.dtype(column.type.value_type.to_pandas_dtype())
    packed = [
        _pack(value, dtype, column.name, row) for value, row in zip(values, rows, strict=True)
    ]
    offsets = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum([len(data) for data in packed], out=offsets[1:])
    offsets //= dtype.itemsize
    flat = pa.Array.from_buffers(
        column.type.value_type, int(offsets[-1]), [None, pa.py_buffer(b"".join(packed))]
    )
    mask = pa.array(missing) if any(missing) else None
    return pa.LargeListArray.from_arrays(offsets, flat, type=column.type, mask=mask)


def _pack(value: Any, dtype: np.dtype, field: str, row: dict[str, Any]) -> bytes:
    """Numbers as bytes. Arrays, tensors, bools and whole floats count as numbers."""
    if value is None:
        return b""
    if type(value) is list:
        try:
            return struct.pack(f"{len(value)}{dtype.char}", *value)
        except (struct.error, OverflowError):
            pass  # converted with care below, or refused with the sample's name
    try:
        given = np.asarray(value)
        cast = given.astype(dtype)
    except (TypeError, ValueError) as error:
        raise DataError(f"{field} of {_name(row)} is no list of numbers") from error
    exact = dtype.kind == "f" or np.array_equal(cast, given)
    if given.ndim != 1 or given.dtype.kind not in "biuf" or not exact:
        raise DataError(f"{field} of {_name(row)} is no list of {dtype}")
    return cast.tobytes()


def _json(value: Any, field: str, row: dict[str, Any]) -> str | None:
    return None if value is None else to_json(value, f"{field} of {_name(row)}")


def _status(row: dict[str, Any]) -> str:
    try:
        return Status(row["status"]).value
    except ValueError as error:
        raise DataError(f"status of {_name(row)} is {row['status']!r}") from error


def _encode_prompt(rows: list[dict[str, Any]], extra: list[dict[str, Any]]) -> dict[str, pa.Array]:
    texts = [row["prompt"] if isinstance(row["prompt"], str) else None for row in rows]
    others = [
        None if isinstance(row["prompt"], str) else _json(row["prompt"], "prompt", row)
        for row in rows
    ]
    return {
        "prompt": _plain(_BY_NAME["prompt"], texts, extra),
        "prompt_messages": pa.array(others, TEXT),
    }


def _encode_reward(rows: list[dict[str, Any]], extra: list[dict[str, Any]]) -> dict[str, pa.Array]:
    numbers: list[float | None] = []
    texts: list[str | None] = []
    for row, more in zip(rows, extra, strict=True):
        reward = row["reward"]
        number, text = None, None
        if isinstance(reward, dict):
            text = _json(reward, "reward", row)
        elif isinstance(reward, (int, float, np.number, np.bool_)):
            number = _as_float(reward)
            if number != reward and reward == reward:
                more["reward"] = reward
        elif reward is not None:
            more["reward"] = reward
        numbers.append(number)
        texts.append(text)
    return {"reward": pa.array(numbers, pa.float64()), "reward_values": pa.array(texts, TEXT)}


def _as_float(number: Any) -> float | None:
    try:
        return float(number)
    except OverflowError:
        return None


def _encode_spans(rows: list[dict[str, Any]]) -> pa.Array:
    spans = [span for row in rows for span in row["spans"] or ()]
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row["spans"] or ()) for row in rows], out=offsets[1:])
    columns = [[getattr(span, field.name) for span in spans] for field in SPAN]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SPAN, strict=True)]
    values = pa.StructArray.from_arrays(arrays, fields=list(SPAN))
    return pa.LargeListArray.from_arrays(offsets, values, type=_BY_NAME["spans"].type)


def _encode_experts(rows: list[dict[str, Any]]) -> dict[str, pa.Array]:
    names = ("rollout_routed_experts", *(f"rollout_routed_experts_{x}" for x in ("shape", "type")))
    columns: list[list[Any]] = [[], [], []]
    for row in rows:
        experts = row["rollout_routed_experts"]
        entry = (None, None, None) if experts is None else _pack_experts(experts, row)
        for column, value in zip(columns, entry, strict=True):
            column.append(value)
    return {n: pa.array(c, _BY_NAME[n].type) for n, c in zip(names, columns, strict=True)}


def _pack_experts(experts: Any, row: dict[str, Any]) -> tuple[bytes, list[int], str]:
    """Bytes in the smallest type that holds them, shape, and what they were."""
    try:
        array = np.asarray(experts if not isinstance(experts, list) or experts else [], np.int64)
    except (TypeError, ValueError) as error:
        raise DataError(f"rollout_routed_experts of {_name(row)} are no integers") from error
    kind = "list" if isinstance(experts, list) else np.asarray(experts).dtype.name
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    small = next(
        (t for t in (np.uint8, np.uint16) if low >= 0 and high <= np.iinfo(t).max), np.int64
    )
    return array.astype(small).tobytes(), list(array.shape), kind


def _decode_experts(row: dict[str, Any]) -> Any:
    data = row.get("rollout_routed_experts")
    if data is None:
        return None
    kind = row["rollout_routed_experts_type"]
    array = stored_experts(data, row["rollout_routed_experts_shape"])
    return array.tolist() if kind == "list" else array.astype(kind)


def stored_experts(data: bytes | pa.Buffer, shape: Sequence[int]) -> np.ndarray:
    """One row's routed experts in the type that they are stored in, a view of `data`."""
    count, size = int(np.prod(shape, dtype=np.int64)), len(memoryview(data))
    stored = {1: np.uint8, 2: np.uint16, 8: np.int64}[size // count if count else 1]
    return np.frombuffer(data, dtype=stored).reshape(shape)
