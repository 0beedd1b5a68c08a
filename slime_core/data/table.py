"""Random access to the rows of prompts files, with memory bounded by eight bytes a row.

Plain jsonl is read in place through the offsets of its lines. Compressed jsonl is unpacked, and
parquet rewritten as Arrow, into unnamed temporary files that vanish with the process.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from slime_core.data.readers import (
    CHUNK_BYTES,
    DataPath,
    Opener,
    ReadCounts,
    Row,
    as_in_json,
    check_readable,
    decompressed,
    fingerprint,
    is_parquet,
    numbered_lines,
    open_local,
    parquet_batches,
    parse_data_path,
    parse_line,
)
from slime_core.errors import DataError

RowCheck = Callable[[Row], str | None]


@dataclass
class _Reading:
    """How a file is read: rows beyond `limit` good ones are not looked at."""

    check: RowCheck | None
    max_bad_rows: int
    counts: ReadCounts
    limit: int | None

    def accepts(self, row: Row, where: str) -> bool:
        problem = self.check(row) if self.check else None
        if problem:
            self.counts.add_bad(f"{where}: {problem}", self.max_bad_rows)
        return not problem

    def enough(self, rows: int) -> bool:
        return self.limit is not None and rows >= self.limit


class _Rows(Protocol):
    """The good rows of one file, numbered from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class RowTable:
    """All good rows of one or more prompts files, in the order of the files.

    Attributes:
        specs: the files as given, `path@[a:b]` included.
        fingerprint: names the content of the files.
        counts: rows, blank lines and bad rows met when the table was opened.
    """

    def __init__(
        self,
        specs: str | Sequence[str],
        *,
        check: RowCheck | None = None,
        max_bad_rows: int = 0,
        opener: Opener = open_local,
    ) -> None:
        """Opens and validates every row once.

        Args:
            specs: one path or several.
            check: says in one sentence what is wrong with a row, None where it is good.
            max_bad_rows: how many bad rows may be skipped over all files.
            opener: opens a path for bytes.

        Raises:
            DataError: a file is missing, damaged or without a good row, or a row is bad.
        """
        self.specs = [specs] if isinstance(specs, str) else list(specs)
        if not self.specs:
            raise DataError("no prompts file given; set --prompt-data")
        self.counts = ReadCounts()
        self.fingerprint = fingerprint(self.specs, opener)
        self._parts: list[_Rows] = []
        for spec in self.specs:
            path = parse_data_path(spec)
            check_readable(path.path)
            kind = _ArrowRows if is_parquet(path.path) else _LineRows
            limit = path.stop if (path.start or 0) >= 0 and (path.stop or 0) >= 0 else None
            reading = _Reading(check, max_bad_rows, self.counts, limit)
            whole = kind(path.path, reading, opener)
            part = _sliced(whole, path)
            if not len(part):
                raise DataError(f"{spec} holds no prompts: {self._why_empty(len(whole))}")
            self._parts.append(part)
            self.counts.rows += len(part)

    def __len__(self) -> int:
        return self.counts.rows

    def __getitem__(self, index: int) -> Row:
        """Row `index` in [0, len)."""
        if index < 0:
            raise IndexError(index)
        for part in self._parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)

    @property
    def sizes(self) -> list[int]:
        """Rows of each file."""
        return [len(part) for part in self._parts]

    def _why_empty(self, rows: int) -> str:
        """
        Args:
            rows: good rows of the file, in the slice or before it.
        """
        if rows:
            return "no row of the file lies in the slice"
        if self.counts.bad:
            return f"{len(self.counts.bad)} bad rows, the first: {self.counts.bad[0]}"
        return "the file is empty" if not self.counts.blank else "only blank lines"


def _sliced(rows: _Rows, path: DataPath) -> _Rows:
    if not path.sliced:
        return rows
    return _RangeRows(rows, range(*slice(path.start, path.stop).indices(len(rows))))


class _RangeRows:
    def __init__(self, rows: _Rows, indices: range) -> None:
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Row:
        return self._rows[self._indices[index]]


class _LineRows:
    """Rows of a jsonl file by the offsets of their lines."""

    def __init__(self, path: str, reading: _Reading, opener: Opener) -> None:
        self._path = path
        self._offsets = array("q")
        self._numbers = array("q")
        self._file = self._seekable(path, opener)
        for number, offset, line in numbered_lines(path, opener):
            if reading.enough(len(self._offsets)):
                break
            where = f"{path}, line {number}"
            try:
                values = parse_line(line)
            except ValueError as error:
                reading.counts.add_bad(f"{where}: {error}", reading.max_bad_rows)
                continue
            if values is None:
                reading.counts.blank += 1
            elif reading.accepts(Row(values, path, number), where):
                self._offsets.append(offset)
                self._numbers.append(number)

    @staticmethod
    def _seekable(path: str, opener: Opener) -> IO[bytes]:
        if "://" not in path and not path.lower().endswith((".gz", ".zst")):
            return Path(path).open("rb")
        spool = tempfile.TemporaryFile()  # noqa: SIM115
        with decompressed(path, opener) as source:
            while chunk := source.read(CHUNK_BYTES):
                spool.write(chunk)
        return spool

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        self._file.seek(self._offsets[index])
        number = self._numbers[index]
        try:
            values = parse_line(self._file.readline())
        except ValueError:
            values = None
        if values is None:
            raise DataError(f"{self._path}, line {number}: the file changed while it was in use")
        return Row(values, self._path, number)


class _ArrowRows:
    """Rows of a parquet file, rewritten as memory-mapped Arrow batches."""

    def __init__(self, path: str, reading: _Reading, opener: Opener) -> None:
        import pyarrow as pa

        self._path = path
        self._numbers = array("q")
        self._batch_of = array("q")
        self._spool = tempfile.NamedTemporaryFile(suffix=".arrow")  # noqa: SIM115
        self._starts: list[int] = []
        writer = None
        number = 0
        for index, batch in enumerate(parquet_batches(path, opener)):
            if reading.enough(len(self._numbers)):
                break
            writer = writer or pa.ipc.new_file(self._spool.name, batch.schema)
            writer.write_batch(batch)
            self._starts.append(number)
            for values in batch.to_pylist():
                where = f"{path}, row {number + 1}"
                if reading.accepts(Row(as_in_json(values), path, number + 1), where):
                    self._numbers.append(number)
                    self._batch_of.append(index)
                number += 1
        if writer:
            writer.close()
            self._reader: Any = pa.ipc.open_file(pa.memory_map(self._spool.name))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Row:
        number, batch = self._numbers[index], self._batch_of[index]
        row = self._reader.get_batch(batch).slice(number - self._starts[batch], 1)
        return Row(as_in_json(row.to_pylist()[0]), self._path, number + 1)
