"""metrics.jsonl: one line a record, appended only, always written."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from slime_core.errors import FullError, StoreError
from slime_core.store.file_errors import trouble
from slime_core.tracking.projection import Record


class MetricsFile:
    """The records of a run on this machine, and the queue that trackers read.

    A process that is killed while it appends leaves a torn last line; opening removes it, and the
    record is projected again from the store.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._cut_torn_line()
            self._keys = {record.key for record in self.read()}
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error

    @property
    def keys(self) -> frozenset[str]:
        """Keys of all records."""
        with self._lock:
            return frozenset(self._keys)

    def append(self, record: Record) -> bool:
        """Writes a record; False if its key is there already.

        Raises:
            StoreError: the disk is full or the file cannot be written.
        """
        line = json.dumps(record.to_json(), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if record.key in self._keys:
                return False
            end = os.fstat(self._file.fileno()).st_size
            try:
                written = self._file.write(line)
            except OSError as error:
                raise trouble(error, self.path) from error
            if written != len(line):
                self._file.truncate(end)
                raise FullError(f"no space left to write {self.path}; free some")
            self._keys.add(record.key)
            return True

    def read(self, offset: int = 0) -> Iterator[Record]:
        """The records from a byte offset on."""
        for record, _ in self.read_with_offsets(offset):
            yield record

    def read_with_offsets(self, offset: int = 0) -> Iterator[tuple[Record, int]]:
        """Records with the byte offset that follows each.

        Raises:
            StoreError: a line is not a record.
        """
        try:
            lines = self.path.open("rb")
        except FileNotFoundError:
            return
        with lines:
            lines.seek(offset)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                try:
                    record = Record.from_json(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise StoreError(
                        f"{self.path}: the line that ends at byte {offset} is damaged ({error}): "
                        "delete the file, it is made again from the store"
                    ) from error
                yield record, offset

    def close(self) -> None:
        self._file.close()

    def _cut_torn_line(self) -> None:
        """Truncates after the last line feed."""
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            while end > 0:
                start = max(0, end - 65536)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    end = start + newline + 1
                    break
                end = start
            file.truncate(end)
