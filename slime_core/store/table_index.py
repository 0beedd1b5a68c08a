"""Flat tables of a run that were made once and are kept near the reader.

Everything here can be deleted at any time and is made again from the store. Tables lie in one file
a number (a segment or an iteration), and in one file for each full stretch of STRETCH numbers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pyarrow as pa

from slime_core.errors import StoreError
from slime_core.store import layout
from slime_core.store.cache import NodeCache
from slime_core.store.digest import checksum

STRETCH = 64
_MARK = "~"
Build = Callable[[NodeCache, list[int]], pa.Table]


class TableIndex:
    """Keeps tables whose sources never change, or say so by another mark.

    Args:
        cache: the run; without a local folder nothing is kept.
    """

    def __init__(self, cache: NodeCache) -> None:
        self._cache = cache
        self._folder: Path | None = None
        if cache.directory is not None:
            # A run that was deleted and made again under its name has another run.json.
            name = checksum(cache.backend.get(layout.RUN))[:16]
            self._folder = cache.directory / "tables" / name

    def table(
        self,
        kind: str,
        numbers: Collection[int],
        build: Build,
        marks: Mapping[int, str] | None = None,
    ) -> pa.Table:
        """The rows of these numbers, in their order.

        Args:
            kind: names the table.
            numbers: ascending; what stands under each changes with its mark only.
            build: makes the rows of some numbers.
            marks: of numbers that have one.
        """
        marks = marks or {}
        tables = []
        stretches: dict[int, list[int]] = {}
        for number in numbers:
            stretches.setdefault(number // STRETCH, []).append(number)
        for stretch, members in stretches.items():
            if len(members) == STRETCH:
                all_marks = "".join(marks.get(n, "-") for n in members).strip("-")
                name = _marked(f"{kind}-x{stretch:06d}", all_marks)
                names = [_marked(_single(kind, n), marks.get(n, "")) for n in members]
                tables.append(self._kept(name, members, self._joined(names, build)))
            else:
                tables += [
                    self._kept(_marked(_single(kind, n), marks.get(n, "")), [n], build)
                    for n in members
                ]
        return pa.concat_tables(tables) if tables else build(self._cache, [])

    def forget(self) -> None:
        """Deletes all tables: they hold what was given up in the store meanwhile."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _joined(self, names: list[str], build: Build) -> Build:
        """Puts a stretch together from what is kept of its numbers, and forgets those."""

        def join(cache: NodeCache, members: list[int]) -> pa.Table:
            kept = [table for name in names if (table := self._read(name)) is not None]
            whole = len(kept) == len(members)
            joined = pa.concat_tables(kept).combine_chunks() if whole else build(cache, members)
            if self._folder is not None:
                for name in names:
                    self._remove(name)
            return joined

        return join

    def _kept(self, name: str, members: list[int], build: Build) -> pa.Table:
        known = self._read(name)
        if known is not None:
            return known
        made = build(self._cache, members)
        if self._folder is not None:
            self._remove(name)
            self._write(self._path(name), made)
        return made

    def _remove(self, name: str) -> None:
        """Deletes a table under each of its marks."""
        assert self._folder is not None
        bare = name.partition(_MARK)[0]
        for path in (*self._folder.glob(f"{bare}{_MARK}*.arrow"), self._path(bare)):
            path.unlink(missing_ok=True)

    def _read(self, name: str) -> pa.Table | None:
        if self._folder is None or not self._path(name).exists():
            return None
        path = self._path(name)
        try:
            with pa.memory_map(str(path)) as file:
                return pa.ipc.open_file(file).read_all()
        except (OSError, pa.ArrowInvalid):
            path.unlink(missing_ok=True)  # half a file of a machine that went down: made again
            return None

    def _write(self, path: Path, table: pa.Table) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with (
                pa.OSFile(str(temporary), "wb") as sink,
                pa.ipc.new_file(sink, table.schema) as out,
            ):
                out.write_table(table)
            temporary.replace(path)
        except OSError as error:
            raise StoreError(f"the node cache {path} cannot be written: {error}") from error

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.arrow"


def _single(kind: str, number: int) -> str:
    return f"{kind}-{number:06d}"


def _marked(name: str, mark: str) -> str:
    return f"{name}{_MARK}{checksum(mark.encode())[:16]}" if mark else name
