"""Rows of prompts files: jsonl and parquet, plain or compressed, whole or sliced.

What a file may hold is defined here once. Lines end at LF (CR before it is whitespace; U+2028 and
other Unicode line ends are text). A byte order mark at the start of a line is dropped. Blank lines
are skipped and counted. A line that is not one JSON object in UTF-8 is a bad row: it raises, or is
counted while at most `max_bad_rows` were seen. Integers keep all their digits, NaN stays a float.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import xxhash

from slime_core.errors import DataError
from slime_core.near import nearest
from slime_core.untrusted_json import read_json

BOM = b"\xef\xbb\xbf"
CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 256 << 20
PARQUET_BATCH_ROWS = 256
JSONL_SUFFIXES = (".jsonl", ".ndjson")
FORMATS = ".jsonl, .ndjson (each also .gz or .zst) and .parquet"
SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]", re.DOTALL)

Opener = Callable[[str], IO[bytes]]


@dataclass(frozen=True)
class DataPath:
    """A file and the part of its rows that is meant, with Python's slice semantics."""

    path: str
    start: int | None = None
    stop: int | None = None

    @property
    def sliced(self) -> bool:
        return self.start is not None or self.stop is not None

    def __str__(self) -> str:
        if not self.sliced:
            return self.path
        bound = ["" if value is None else str(value) for value in (self.start, self.stop)]
        return f"{self.path}@[{bound[0]}:{bound[1]}]"


@dataclass(frozen=True)
class Row:
    """One row, and where it stands: line number (jsonl) or row number (parquet), from 1."""

    values: dict[str, Any]
    file: str
    number: int

    @property
    def where(self) -> str:
        return f"{self.file}, row {self.number}"


@dataclass
class ReadCounts:
    """What a read has met. `bad` holds one sentence for each bad row."""

    rows: int = 0
    blank: int = 0
    bad: list[str] = field(default_factory=list)

    def add_bad(self, message: str, max_bad_rows: int) -> None:
        """Counts a bad row; raises DataError beyond `max_bad_rows`."""
        self.bad.append(message)
        if len(self.bad) <= max_bad_rows:
            return
        if max_bad_rows:
            message += f" ({len(self.bad)} bad rows, more than --max-bad-rows {max_bad_rows})"
        else:
            message += "; mend the row, or allow some with --max-bad-rows"
        raise DataError(message)


def parse_data_path(text: str) -> DataPath:
    """Reads `file` or `file@[start:stop]`; raises DataError for another slice form."""
    match = SLICE.fullmatch(text)
    if match:
        start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
        return DataPath(match["path"], start, stop)
    if "@[" in text:
        raise DataError(f"{text}: a slice is written file@[start:stop] with whole numbers")
    return DataPath(text)


def open_local(path: str) -> IO[bytes]:
    """Opens a local file for reading bytes.

    Raises:
        DataError: it is a URL; store.urls opens those.
    """
    if "://" in path:
        raise DataError(f"{path}: only local files can be read here; copy it first")
    return Path(path).open("rb")


def check_readable(path: str) -> None:
    """Raises DataError unless `path` is a readable file of a known format (URLs: format only)."""
    _kind(path)
    if "://" in path:
        return
    file = Path(path)
    if file.is_dir():
        raise DataError(f"{path} is a folder; name a file in it")
    if not file.exists():
        shown = path if file.is_absolute() else f"{path} ({file.resolve()})"
        raise DataError(f"{shown}: no such file{_near(file)}")
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def read_rows(
    spec: str | DataPath,
    *,
    max_bad_rows: int = 0,
    counts: ReadCounts | None = None,
    opener: Opener = open_local,
) -> Iterator[Row]:
    """Streams the rows of one file.

    Args:
        spec: the file, `path@[start:stop]` for a part; negative bounds cost one more pass.
            Slices count good rows.
        max_bad_rows: how many bad rows are skipped before one raises.
        counts: filled while reading.
        opener: opens a path for bytes; another one is needed for URLs (store.urls).

    Raises:
        DataError: the file is missing, of unknown format or damaged, or a row is bad.
    """
    path = parse_data_path(spec) if isinstance(spec, str) else spec
    counts = counts if counts is not None else ReadCounts()
    check_readable(path.path)
    start, stop = path.start or 0, path.stop
    if start < 0 or (stop is not None and stop < 0):
        tally = ReadCounts()
        total = sum(1 for _ in _all_rows(path.path, max_bad_rows, tally, opener))
        start, stop, _ = slice(path.start, path.stop).indices(total)
    return _counted(islice(_all_rows(path.path, max_bad_rows, counts, opener), start, stop), counts)


def fingerprint(specs: Sequence[str], opener: Opener = open_local) -> str:
    """Names the content of prompts files: 32 hex digits from slices, sizes and xxh3 of the bytes.

    Paths do not enter, so a moved file keeps its fingerprint.
    """
    total = xxhash.xxh3_128()
    for spec in specs:
        path = parse_data_path(spec)
        check_readable(path.path)
        size, content = 0, xxhash.xxh3_128()
        with opener(path.path) as file:
            while chunk := file.read(CHUNK_BYTES):
                size += len(chunk)
                content.update(chunk)
        total.update(f"{path.start}:{path.stop}:{size}:{content.hexdigest()};".encode())
    return total.hexdigest()


def _counted(rows: Iterator[Row], counts: ReadCounts) -> Iterator[Row]:
    for row in rows:
        counts.rows += 1
        yield row


def _kind(path: str) -> str:
    if "://" in path:
        path = urlsplit(path).path
    suffixes = [suffix.lower() for suffix in Path(path).suffixes[-2:]]
    if suffixes and suffixes[-1] == ".parquet":
        return "parquet"
    if suffixes and suffixes[-1] in JSONL_SUFFIXES:
        return "plain"
    if len(suffixes) == 2 and suffixes[0] in JSONL_SUFFIXES and suffixes[1] in (".gz", ".zst"):
        return suffixes[1][1:]
    raise DataError(f"{path}: unknown format; {FORMATS} can be read")


def _near(file: Path) -> str:
    """A hint for a missing file: a similar name beside it, or the folder that is missing."""
    if not file.parent.is_dir():
        return f" (the folder {file.parent} does not exist either)"
    names = [entry.name for entry in islice(file.parent.iterdir(), 1000)]
    close = nearest(file.name, names)
    return f"; did you mean {file.parent / close}?" if close else ""


def _all_rows(path: str, max_bad_rows: int, counts: ReadCounts, opener: Opener) -> Iterator[Row]:
    if _kind(path) == "parquet":
        yield from _parquet_rows(path, opener)
        return
    for number, _, line in numbered_lines(path, opener):
        try:
            values = parse_line(line)
        except ValueError as error:
            counts.add_bad(f"{path}, line {number}: {error}", max_bad_rows)
            continue
        if values is None:
            counts.blank += 1
            continue
        yield Row(values, path, number)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object on one line, None for a blank line; ValueError says what is wrong with it."""
    text = line.removeprefix(BOM).strip(b" \t\r\n")
    if not text:
        return None
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"longer than {MAX_LINE_BYTES >> 20} MiB")
    if b"\0" in text:
        raise ValueError("holds NUL bytes (was the file cut off while it was written?)")
    try:
        values = read_json(text.decode("utf-8"))
    except UnicodeError as error:
        raise ValueError("not valid UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(values, dict):
        raise ValueError(f"a JSON object is needed, found {type(values).__name__}")
    return values


def numbered_lines(path: str, opener: Opener) -> Iterator[tuple[int, int, bytes]]:
    """Yields (line number from 1, offset in the decompressed bytes, line with its end).

    A line beyond MAX_LINE_BYTES comes cut, one byte too long, so that `parse_line` refuses it.
    """
    offset = number = 0
    with decompressed(path, opener) as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            yield number, offset, line
            offset += len(line)
            while not line.endswith(b"\n") and len(line) > MAX_LINE_BYTES:
                line = file.readline(MAX_LINE_BYTES + 1)
                offset += len(line)


@contextmanager
def decompressed(path: str, opener: Opener) -> Iterator[IO[bytes]]:
    """Opens a jsonl file as plain bytes, whatever its compression.

    Raises:
        DataError: it cannot be read or is damaged (also from inside the `with`).
    """
    try:
        with opener(path) as raw:
            yield _unpacked(raw, _kind(path))
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path} is damaged or cannot be read: {error}") from error


def _unpacked(raw: IO[bytes], kind: str) -> IO[bytes]:
    if kind == "gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), CHUNK_BYTES)  # type: ignore[arg-type]
    if kind == "zst":
        import pyarrow as pa

        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        return io.BufferedReader(stream, CHUNK_BYTES)  # type: ignore[arg-type]
    return raw


def is_parquet(path: str) -> bool:
    """Whether a path or URL names a parquet file."""
    return _kind(path) == "parquet"


def parquet_batches(path: str, opener: Opener) -> Iterator[Any]:
    """Streams pyarrow record batches of a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with opener(path) as file, pq.ParquetFile(file) as table:
            yield from table.iter_batches(batch_size=PARQUET_BATCH_ROWS)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error


def _parquet_rows(path: str, opener: Opener) -> Iterator[Row]:
    number = 0
    for batch in parquet_batches(path, opener):
        for values in batch.to_pylist():
            number += 1
            yield Row(as_in_json(values), path, number)


def as_in_json(value: Any) -> Any:
    """A table's value as a line of JSON would have it: times and dates in ISO form, exact numbers
    as text. Bytes stay, for pictures."""
    if isinstance(value, dict):
        return {name: as_in_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_in_json(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bytes)):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
