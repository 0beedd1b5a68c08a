"""Lines of the log files of a run's processes, read while they grow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
OURS = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ([A-Z]+) ([^\s:]+): (.*)")
FOREIGN = re.compile(r"\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* .*")
READ_MOST_BYTES = 256 * 1024
MESSAGE_MOST_CHARS = 4000


@dataclass
class LogLine:
    """One message; what follows it without a time of its own (a traceback) belongs to it.

    Attributes:
        source: name of the file without suffix, such as trainer-0.
        level: as logging counts, 20 is INFO.
    """

    source: str
    time: datetime
    level: int
    logger: str
    message: str


@dataclass
class LogFile:
    """A growing file.

    Attributes:
        offset: bytes that were read.
        skipped_bytes: of the last read, where the file grew faster than it may be read.
    """

    path: Path
    offset: int = 0
    skipped_bytes: int = 0

    def read(self) -> list[LogLine]:
        """The complete lines since the last time, at most READ_MOST_BYTES of the newest."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return []
        self.skipped_bytes = max(0, size - self.offset - READ_MOST_BYTES)
        with self.path.open("rb") as file:
            file.seek(self.offset + self.skipped_bytes)
            block = file.read(READ_MOST_BYTES)
        whole = block.rfind(b"\n") + 1
        if not whole and len(block) == READ_MOST_BYTES:
            whole = len(block)  # a line that is longer than a read
        self.offset += self.skipped_bytes + whole
        begin = block.find(b"\n") + 1 if self.skipped_bytes else 0  # the rest of a line is none
        return parse(self.path.stem, block[begin:whole].decode("utf-8", errors="replace"))


@dataclass
class LogFiles:
    """All log files of a folder whose names begin with one of `sources`."""

    folder: Path
    sources: Sequence[str]
    files: dict[str, LogFile] = field(default_factory=dict)

    def skip(self) -> None:
        """Leaves out what stands in the files now."""
        for file in self._found():
            file.offset = file.path.stat().st_size

    def read(self) -> list[LogLine]:
        """New lines of all files, by time."""
        lines = [line for file in self._found() for line in file.read()]
        return sorted(lines, key=lambda line: line.time)

    @property
    def skipped_bytes(self) -> int:
        """Bytes that the last `read` passed over."""
        return sum(file.skipped_bytes for file in self.files.values())

    def _found(self) -> list[LogFile]:
        for path in sorted(self.folder.glob("*.log")):
            if path.name not in self.files and path.stem.split("-")[0] in self.sources:
                self.files[path.name] = LogFile(path)
        return list(self.files.values())


def parse(source: str, text: str) -> list[LogLine]:
    """Messages of a piece of a log file, ours or another program's."""
    lines: list[LogLine] = []
    for row in text.splitlines():
        if ours := OURS.fullmatch(row):
            seconds, millis, level, logger, message = ours.groups()
            time = _time(seconds, int(millis))
            lines.append(LogLine(source, time, LEVELS.get(level, 20), logger, message))
        elif foreign := FOREIGN.fullmatch(row):
            lines.append(LogLine(source, _time(foreign[1], 0), _level(row), source, row))
        elif lines:
            lines[-1].message = f"{lines[-1].message}\n{row}"[:MESSAGE_MOST_CHARS]
        elif row.strip():
            lines.append(LogLine(source, datetime.now(UTC), _level(row), source, row))
    for line in lines:
        line.message = line.message[:MESSAGE_MOST_CHARS]
    return lines


def chosen(lines: Sequence[LogLine], most: int) -> tuple[list[LogLine], int]:
    """At most `most` of the lines, in their order; the gravest stay, then the first.

    Returns:
        The lines that stay, and how many were left out.
    """
    ranks = sorted(range(len(lines)), key=lambda i: (-lines[i].level, i))
    kept = sorted(ranks[:most])
    return [lines[i] for i in kept], len(lines) - len(kept)


def _time(text: str, millis: int) -> datetime:
    """Log files are written in local time."""
    local = datetime.fromisoformat(text).replace(microsecond=millis * 1000)
    return local.astimezone(UTC)


def _level(row: str) -> int:
    """Of a line that another program wrote; INFO unless it says something graver."""
    found = [number for name, number in LEVELS.items() if re.search(rf"\b{name}\b", row[:200])]
    return max(found, default=20)
