"""Parts: Arrow IPC files that hold finished groups, one record batch a group.

A part says what it holds in its schema metadata and carries its own checksum in its name. It counts
once `put_new` has returned; until then its groups are not finished.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import orjson
import pyarrow as pa

from slime_core.errors import DataError, DigestError, LostRaceError, MissingError
from slime_core.sample import Sample
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.cache import NodeCache
from slime_core.store.codec import encode_samples
from slime_core.store.columnar import SampleBatch
from slime_core.store.digest import checksum, group_digests
from slime_core.store.schema import METADATA_KEY, PART_SCHEMA, SCHEMA_VERSION

KEPT, DROPPED, ABORTED, FAILED = "kept", "dropped", "aborted", "failed"
SPARE = "spare"
VERDICTS = (KEPT, DROPPED, SPARE, ABORTED, FAILED)
FINAL = (KEPT, DROPPED, SPARE)
_MAGIC_BYTES = 8  # "ARROW1" and padding before the first message of an IPC file


@dataclass(frozen=True)
class GroupRows:
    """A group on its way into the store: all rows of one attempt at one draw.

    Attributes:
        group_id: the draw's number.
        attempt: how often it was begun before.
        data_epoch, position: the draw id.
        samples: rows in the order of the rollouts; fan-out siblings one after another.
        verdict: `kept`, `dropped` and `spare` (a filter would drop it, unless a batch cannot be
            filled otherwise) are final; `aborted` and `failed` rows are partial.
        reason: why it was not kept.
        grader_digest: which grader gave the rewards; a sequence names one for each row.
    """

    group_id: int
    attempt: int
    data_epoch: int
    position: int
    samples: Sequence[Sample]
    verdict: str = KEPT
    reason: str | None = None
    grader_digest: str | Sequence[str | None] | None = None


@dataclass(frozen=True)
class GroupEntry:
    """What a part says about one of its groups. `batch` is the number of its record batch."""

    group_id: int
    attempt: int
    verdict: str
    reason: str | None
    rows: int
    rollouts: int
    tokens: int
    digest: str
    batch: int

    @property
    def complete(self) -> bool:
        """The group is finished: it is trained or dropped, and not generated again."""
        return self.verdict in FINAL


@dataclass(frozen=True)
class Part:
    """A stored part and what is in it."""

    name: layout.PartName | layout.CompactName
    size_bytes: int
    groups: tuple[GroupEntry, ...]

    @property
    def key(self) -> str:
        return self.name.key

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return sum(group.tokens for group in self.groups)


def write_part(
    backend: Backend,
    segment: int,
    epoch: int,
    seq: int,
    groups: Sequence[GroupRows],
    cache: NodeCache | None = None,
) -> Part:
    """Stores finished groups; when it returns, they are finished.

    Args:
        seq: the writer's own counter; among equal groups the lowest (epoch, seq) counts.
        cache: gets a copy, so that a trainer on this node need not fetch it.

    Raises:
        DataError: a group that contradicts itself or cannot be kept.
        StoreError: the store refused it.
    """
    rows, counts = _encode_groups(groups, segment)
    digests = group_digests(rows, counts)
    entries = tuple(
        _entry(group, digest, i)
        for i, (group, digest) in enumerate(zip(groups, digests, strict=True))
    )
    starts = itertools.accumulate(counts, initial=0)
    batches = [rows.slice(start, count) for start, count in zip(starts, counts, strict=False)]
    about = {"format": "slime-flow part", "version": SCHEMA_VERSION, "segment": segment}
    about |= {"epoch": epoch, "seq": seq, "groups": [asdict(entry) for entry in entries]}
    data = serialise(batches, PART_SCHEMA, about)
    name = layout.PartName(segment, epoch, seq, checksum(data))
    with suppress(LostRaceError):  # the name holds the checksum: these very bytes stand there
        backend.put_new(name.key, memoryview(data))
    if cache is not None:
        cache.keep(name.key, data)
    return Part(name, len(data), entries)


class PartFile:
    """A verified part, open for reading. Its columns are views of `data`, the mapped file.

    Attributes:
        digests: (group id, attempt) -> digest of the rows.
    """

    def __init__(self, name: layout.PartName | layout.CompactName, data: pa.Buffer) -> None:
        found = checksum(data)
        if found != name.checksum:
            raise DigestError(f"{name.key} is damaged: its bytes have checksum {found}")
        try:
            self._reader = pa.ipc.open_file(pa.BufferReader(data))
            about = read_about(self._reader.schema)
            self.digests = {(g["group_id"], g["attempt"]): g["digest"] for g in about["groups"]}
            self._lost = {int(i): frozenset(told["planes"]) for i, told in lost_in(about).items()}
            self._left = {int(i): str(told["left"]) for i, told in lost_in(about).items()}
        except (pa.ArrowInvalid, ValueError, KeyError, TypeError) as error:
            raise DigestError(f"{name.key} is no part of this program: {error}") from error
        if about["version"] > SCHEMA_VERSION:
            raise DataError(
                f"{name.key} has schema {about['version']}, this program reads {SCHEMA_VERSION}: "
                "update slime-flow"
            )
        self.data = data
        self._name = name
        self._groups = about["groups"]

    @cached_property
    def part(self) -> Part:
        """What is in it."""
        try:
            groups = tuple(GroupEntry(**group) for group in self._groups)
        except TypeError as error:
            raise DigestError(f"{self._name.key} is no part of this program: {error}") from error
        return Part(self._name, len(self.data), groups)

    @cached_property
    def _batches(self) -> dict[tuple[int, int], GroupEntry]:
        return {(group.group_id, group.attempt): group for group in self.part.groups}

    def find(self, group_id: int, attempt: int) -> GroupEntry | None:
        """What the part says about one attempt at a group, None where it holds none."""
        return self._batches.get((group_id, attempt))

    def rows(self, batch: int) -> SampleBatch:
        """The rows of one group."""
        return SampleBatch(self._reader.get_batch(batch), self.lost(batch))

    def lost(self, batch: int) -> frozenset[str]:
        """The planes that the rows of a group had and that were given up."""
        return self._lost.get(batch, frozenset())

    @property
    def planes_lost(self) -> int:
        """How many planes of groups were given up in all."""
        return sum(map(len, self._lost.values()))

    def digest_of(self, batch: int) -> str:
        """The digest of a group's rows as they are here: the sealed one, unless a plane went."""
        return self._left.get(batch) or self._groups[batch]["digest"]

    def columns(self, names: Sequence[str]) -> list[SampleBatch]:
        """Only these columns of each group, in the order of their record batches.

        Several times as fast as `rows` for all of them: Arrow's reader of files looks at every
        column of a record batch, its reader of streams only at those that are asked for.
        """
        fields = sorted(self._reader.schema.get_field_index(name) for name in names)
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        data = pa.BufferReader(self.data.slice(_MAGIC_BYTES))
        return [SampleBatch(batch) for batch in pa.ipc.open_stream(data, options=options)]

    def all_rows(self) -> SampleBatch:
        """The rows of all groups."""
        return SampleBatch(self._reader.read_all())

    def byte_ranges(self) -> list[tuple[int, int]]:
        """(start, length) of each record batch message in the file, for readers of ranges."""
        stream = pa.BufferReader(self.data.slice(_MAGIC_BYTES))
        pa.ipc.read_message(stream)
        ranges = []
        for _ in range(self._reader.num_record_batches):
            start = stream.tell()
            pa.ipc.read_message(stream)
            ranges.append((_MAGIC_BYTES + start, stream.tell() - start))
        return ranges


def open_part(cache: NodeCache, key: str) -> PartFile:
    """Opens and verifies a part.

    Raises:
        MissingError: it is not there.
        DigestError: its bytes are not those its name promises.
    """
    name = layout.parse_part(key) or layout.parse_compact(key)
    if name is None:
        raise DataError(f"{key} is no part")
    try:
        return PartFile(name, cache.read(key))
    except DigestError:
        if not cache.forget(key):
            raise
        return PartFile(name, cache.read(key))  # only this node's copy was damaged


@dataclass(frozen=True)
class Quarantined:
    """An object that was moved away because it is damaged."""

    key: str
    reason: str


def list_parts(cache: NodeCache, segment: int) -> tuple[list[PartFile], list[Quarantined]]:
    """All good parts of a segment, in the order of (epoch, seq); damaged ones go to quarantine."""
    names = [
        name
        for entry in cache.backend.list(layout.segment(segment))
        if (name := layout.parse_part(entry.key)) is not None
    ]
    good, bad = [], []
    for name in sorted(names):
        try:
            good.append(open_part(cache, name.key))
        except DigestError as error:
            bad.append(quarantine(cache, name.key, str(error)))
        except MissingError as error:
            bad.append(Quarantined(name.key, str(error)))
    return good, bad


def quarantine(cache: NodeCache, key: str, reason: str) -> Quarantined:
    """Moves a damaged object out of the way, as it is."""
    data = cache.backend.get(key)
    with suppress(LostRaceError):  # somebody else is moving it, too
        cache.backend.put_new(layout.quarantine(key), data)
    cache.backend.delete(key)
    cache.forget(key)
    return Quarantined(key, reason)


def serialise(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    about: dict[str, Any],
    compression: str | None = None,
) -> pa.Buffer:
    """An Arrow IPC file whose schema metadata holds `about`."""
    text = json.dumps(about, separators=(",", ":")).encode()
    schema = schema.with_metadata({METADATA_KEY: text})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def read_about(schema: pa.Schema) -> dict[str, Any]:
    """What `serialise` wrote about the file. Raises ValueError for a foreign file."""
    text = (schema.metadata or {}).get(METADATA_KEY)
    if text is None:
        raise ValueError("it does not say what it is")
    return orjson.loads(text)


def lost_in(about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By number of record batch: `planes` that its rows lost, `left`: the digest of the others."""
    return about.get("lost", {})


def _encode_groups(groups: Sequence[GroupRows], segment: int) -> tuple[pa.RecordBatch, list[int]]:
    """The rows of all groups, and how many each has. Together they cost little more than one."""
    for group in groups:
        _check_group(group)
    counts = [len(group.samples) for group in groups]
    arrays = encode_samples([sample for group in groups for sample in group.samples])
    shared = {
        "group_index": [group.group_id for group in groups],
        "attempt": [group.attempt for group in groups],
        "segment": [segment] * len(groups),
        "data_epoch": [group.data_epoch for group in groups],
        "position": [group.position for group in groups],
        "verdict": [group.verdict for group in groups],
        "verdict_reason": [group.reason for group in groups],
    }
    for name, values in shared.items():
        column = [value for value, n in zip(values, counts, strict=True) for _ in range(n)]
        arrays[name] = pa.array(column, PART_SCHEMA.field(name).type)
    graders = [digest for group in groups for digest in _graders(group)]
    arrays["grader_digest"] = pa.array(graders, PART_SCHEMA.field("grader_digest").type)
    positions = [place for group in groups for place in rollout_positions(group.samples)]
    arrays["sample_position"] = pa.array(positions, pa.int64())
    rows = pa.RecordBatch.from_arrays([arrays[n] for n in PART_SCHEMA.names], schema=PART_SCHEMA)
    return rows, counts


def _graders(group: GroupRows) -> Sequence[str | None]:
    """[rows] of a group."""
    given = group.grader_digest
    return [given] * len(group.samples) if given is None or isinstance(given, str) else given


def _check_group(group: GroupRows) -> None:
    if group.verdict not in VERDICTS:
        raise DataError(f"group {group.group_id} has verdict {group.verdict!r}, not {VERDICTS}")
    if not group.samples:
        raise DataError(f"group {group.group_id} has no samples")
    if len(_graders(group)) != len(group.samples):
        raise DataError(f"group {group.group_id} has not one grader for each of its samples")
    for sample in group.samples:
        sample.check_lengths()
        if sample.group_index not in (None, group.group_id):
            raise DataError(f"{sample.describe()} is stored as part of group {group.group_id}")


def rollout_positions(samples: Sequence[Sample]) -> list[int]:
    """The place of each sample's rollout within the group; fan-out siblings share it. [rows]"""
    places: dict[Any, int] = {}
    keys = [
        ("row", i) if sample.rollout_id is None else ("rollout", sample.rollout_id)
        for i, sample in enumerate(samples)
    ]
    return [places.setdefault(key, len(places)) for key in keys]


def _entry(group: GroupRows, digest: str, batch: int) -> GroupEntry:
    return GroupEntry(
        group_id=group.group_id,
        attempt=group.attempt,
        verdict=group.verdict,
        reason=group.reason,
        rows=len(group.samples),
        rollouts=max(rollout_positions(group.samples)) + 1,
        tokens=sum(sample.response_length for sample in group.samples),
        digest=digest,
        batch=batch,
    )
