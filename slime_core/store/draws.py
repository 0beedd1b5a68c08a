"""The log of draws: which prompts were taken from the data, written before any request leaves.

`draws/<seq>` is a chain of create-only files. Who loses a number takes the winner's draws as logged
and goes on with the next, so every draw has one place and no prompt is taken twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from slime_core.errors import DataError, DigestError, LostRaceError
from slime_core.sample import Sample
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.cache import NodeCache
from slime_core.store.codec import decode_samples, encode_samples
from slime_core.store.digest import checksum, checksum_of
from slime_core.store.parts import rollout_positions, serialise
from slime_core.store.schema import DRAWS_SCHEMA, SCHEMA_VERSION
from slime_core.store.values import from_json, to_json

_UNSIGNED = "0" * 32
_MENTION = b'"checksum":"'
_FOOTER_BYTES = 1 << 16  # where the last mention is looked for first


@dataclass(frozen=True)
class Draw:
    """One prompt taken from the data, with the samples to generate for it.

    Attributes:
        group_id: counter over the run.
        data_epoch, position: which pass over the data and which row of it.
        segment: the segment that drew it.
        samples: one a rollout, with prompt, tokens, ids and metadata, without a response.
        source_state: the data source's own state after this draw (plain values); None where it
            cannot save one.
    """

    group_id: int
    data_epoch: int
    position: int
    segment: int
    samples: Sequence[Sample] = field(default_factory=list, repr=False)
    source_state: Any = None


def log_draws(backend: Backend, seq: int, draws: Sequence[Draw]) -> list[Draw] | None:
    """Logs draws as number `seq`.

    Returns:
        None if they are logged now. Otherwise the draws that another owner logged as `seq`: take
        them instead of yours, set the data source to the state after them, go on with seq + 1.

    Raises:
        DataError: draws without samples or with foreign ones.
    """
    if not draws:
        raise DataError("there are no draws to log")
    about = {"format": "slime-flow draws", "version": SCHEMA_VERSION, "seq": seq}
    data = _signed(serialise([_to_rows(draws)], DRAWS_SCHEMA, about | {"checksum": _UNSIGNED}))
    try:
        backend.put_new(layout.draws(seq), data)
    except LostRaceError:
        return read_draws(NodeCache(backend), seq)
    return None


def list_draws(backend: Backend) -> list[int]:
    """The numbers that are logged. Raises DigestError where one before the last is missing."""
    found = [layout.parse_draws(entry.key) for entry in backend.list(layout.DRAWS)]
    numbers = sorted(number for number in found if number is not None)
    for expected, number in enumerate(numbers):
        if number != expected:
            raise DigestError(f"{layout.draws(expected)} is missing, but {number} is there")
    return numbers


def read_draws(cache: NodeCache, seq: int, *, samples: bool = True) -> list[Draw]:
    """Reads and verifies one file of draws.

    Args:
        samples: without them only ids and states are read, which is much faster.
    """
    key = layout.draws(seq)
    data = cache.read(key)
    if not _is_signed(memoryview(data)):
        raise DigestError(
            f"{cache.backend.url}/{key} is damaged: its bytes are not what was logged"
        )
    rows = pa.ipc.open_file(pa.BufferReader(data)).get_batch(0)
    return _from_rows(rows, samples)


def _signed(unsigned: pa.Buffer) -> bytes:
    """Puts the checksum of the file, made with zeros in its place, into its metadata.

    The name of a file of draws is its number, so the checksum has to stand inside: in the schema
    at the beginning and in the footer's copy of it.
    """
    data = bytearray(unsigned)
    signature = checksum(data).encode()
    for start in _places(memoryview(data)):
        data[start : start + len(signature)] = signature
    return bytes(data)


def _is_signed(data: memoryview) -> bool:
    """Looks at the bytes where they lie: a file of long prompts is large."""
    places = _places(data)
    pieces: list[Any] = []
    end = 0
    for start in places:
        pieces += [data[end:start], _UNSIGNED.encode()]
        end = start + len(_UNSIGNED)
    found = {bytes(data[start : start + len(_UNSIGNED)]) for start in places}
    return found == {checksum_of([*pieces, data[end:]]).encode()}


def _places(data: memoryview) -> list[int]:
    """Where the checksum stands, ascending: after the first and the last mention of it."""
    first = re.search(_MENTION, data)
    if first is None:
        return []
    for tail in (_FOOTER_BYTES, len(data)):
        begin = max(0, len(data) - tail)
        last = bytes(data[begin:]).rfind(_MENTION)
        if last >= 0:
            return sorted({first.end(), begin + last + len(_MENTION)})
    raise AssertionError("unreachable")


def _to_rows(draws: Sequence[Draw]) -> pa.RecordBatch:
    samples: list[Sample] = []
    columns: dict[str, list[Any]] = {
        name: [] for name in ("group_index", "segment", "data_epoch", "position", "sample_position")
    }
    states: list[str | None] = []
    for draw in draws:
        if not draw.samples:
            raise DataError(f"draw {draw.group_id} has no samples")
        for sample in draw.samples:
            if sample.group_index not in (None, draw.group_id):
                raise DataError(f"{sample.describe()} is logged for draw {draw.group_id}")
        count = len(draw.samples)
        samples += draw.samples
        columns["group_index"] += [draw.group_id] * count
        columns["segment"] += [draw.segment] * count
        columns["data_epoch"] += [draw.data_epoch] * count
        columns["position"] += [draw.position] * count
        columns["sample_position"] += rollout_positions(draw.samples)
        state = None
        if draw.source_state is not None:
            state = to_json(draw.source_state, "the state of the data source")
        states += [state, *[None] * (count - 1)]
    arrays = encode_samples(samples)
    for name, values in columns.items():
        arrays[name] = pa.array(values, pa.int64())
    arrays["source_state"] = pa.array(states, pa.large_utf8())
    return pa.RecordBatch.from_arrays([arrays[n] for n in DRAWS_SCHEMA.names], schema=DRAWS_SCHEMA)


def _from_rows(rows: pa.RecordBatch, with_samples: bool) -> list[Draw]:
    names = ("group_index", "data_epoch", "position", "segment", "source_state")
    columns = [rows.column(name).to_pylist() for name in names]
    samples = decode_samples(rows) if with_samples else []
    draws: list[Draw] = []
    for i, (group_id, data_epoch, position, segment, state) in enumerate(
        zip(*columns, strict=True)
    ):
        if not draws or draws[-1].group_id != group_id:
            value = None if state is None else from_json(state)
            draws.append(Draw(group_id, data_epoch, position, segment, [], value))
        if with_samples:
            draws[-1].samples.append(samples[i])  # type: ignore[attr-defined]
    return draws
