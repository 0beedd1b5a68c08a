"""Flat tables of a run that were made once and are kept near the reader.

Everything here can be deleted at any time and is made again from the store. Tables lie in one file
a number (a segment or an iteration), and in one file for each full stretch of STRETCH numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

import pyarrow as pa

from slime_core.errors import StoreError
from slime_core.store import layout
from slime_core.store.cache import NodeCache
from slime_core.store.digest import checksum

STRETCH = 64
Build = Callable[[NodeCache, list[int]], pa.Table]


class TableIndex:
    """Keeps tables whose sources never change.

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

    def table(self, kind: str, numbers: Collection[int], build: Build) -> pa.Table:
        """The rows of these numbers, in their order.

        Args:
            kind: names the table.
            numbers: ascending; what stands under each never changes any more.
            build: makes the rows of some numbers.
        """
        tables = []
        stretches: dict[int, list[int]] = {}
        for number in numbers:
            stretches.setdefault(number // STRETCH, []).append(number)
        for stretch, members in stretches.items():
            if len(members) == STRETCH:
                tables.append(
                    self._kept(f"{kind}-x{stretch:06d}", members, self._singly(kind, build))
                )
            else:
                tables += [self._kept(_single(kind, n), [n], build) for n in members]
        return pa.concat_tables(tables) if tables else build(self._cache, [])

    def _singly(self, kind: str, build: Build) -> Build:
        """Puts a stretch together from what is kept of its numbers, and forgets those."""

        def join(cache: NodeCache, members: list[int]) -> pa.Table:
            names = [_single(kind, n) for n in members]
            kept = [table for name in names if (table := self._read(name)) is not None]
            whole = len(kept) == len(members)
            joined = pa.concat_tables(kept).combine_chunks() if whole else build(cache, members)
            if self._folder is not None:
                for name in names:
                    self._path(name).unlink(missing_ok=True)
            return joined

        return join

    def _kept(self, name: str, members: list[int], build: Build) -> pa.Table:
        known = self._read(name)
        if known is not None:
            return known
        made = build(self._cache, members)
        if self._folder is not None:
            self._write(self._path(name), made)
        return made

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
