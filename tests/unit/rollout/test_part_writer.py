"""A group is finished when the store has acknowledged its part, and not before."""

import asyncio
import itertools
import threading
from pathlib import Path

import pytest

from slime_core.errors import StoreError
from slime_core.rollout import part_writer
from slime_core.rollout.part_writer import PartTarget, PartWriter
from slime_core.store.backend import open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.parts import list_parts
from tests.unit.store.builders import group_rows

SOON_S = 5.0


def target(folder: Path) -> PartTarget:
    backend = open_backend(str(folder))
    return PartTarget(backend, NodeCache(backend), 2, 1, 99)


def writer_of(folder: Path) -> PartWriter:
    return PartWriter(target(folder), itertools.count().__next__)


def test_what_finishes_while_a_part_is_written_shares_the_next_one(tmp_path, monkeypatch):
    """And each put returns only after its own part is in the store."""
    begun, slow, real = threading.Event(), threading.Event(), part_writer.write_part
    written: list[list[int]] = []

    def write(*arguments, **keywords):
        begun.set()
        assert slow.wait(SOON_S)
        part = real(*arguments, **keywords)
        written.append([group.group_id for group in part.groups])
        return part

    monkeypatch.setattr(part_writer, "write_part", write)

    async def body() -> None:
        writer = writer_of(tmp_path)
        puts = [asyncio.create_task(writer.put(group_rows(0)))]
        assert await asyncio.to_thread(begun.wait, SOON_S)
        puts += [asyncio.create_task(writer.put(group_rows(group))) for group in (1, 2, 3)]
        await asyncio.sleep(0)
        assert not any(put.done() for put in puts)
        slow.set()
        await asyncio.wait_for(asyncio.gather(*puts), SOON_S)
        await writer.close()

    asyncio.run(body())
    assert written == [[0], [1, 2, 3]]
    files, bad = list_parts(target(tmp_path).cache, 2)
    assert [(f.part.name.epoch, f.part.name.seq) for f in files] == [(1, 0), (1, 1)] and not bad


def test_a_refused_part_is_the_error_of_every_group_in_it_and_of_no_other(tmp_path, monkeypatch):
    real, refusals = part_writer.write_part, iter([True, False])

    def write(*arguments, **keywords):
        if next(refusals):
            raise StoreError("no space left")
        return real(*arguments, **keywords)

    monkeypatch.setattr(part_writer, "write_part", write)

    async def body() -> None:
        writer = writer_of(tmp_path)
        with pytest.raises(StoreError, match="no space left"):
            await asyncio.wait_for(writer.put(group_rows(0)), SOON_S)
        await asyncio.wait_for(writer.put(group_rows(1)), SOON_S)
        await writer.close()

    asyncio.run(body())


def test_a_group_that_nobody_waits_for_any_more_stops_nothing(tmp_path):
    async def body() -> None:
        writer = writer_of(tmp_path)
        cancelled = asyncio.create_task(writer.put(group_rows(0)))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait_for(writer.put(group_rows(1)), SOON_S)
        await writer.close()

    asyncio.run(body())


def test_closing_writes_what_was_put_before(tmp_path):
    async def body() -> None:
        writer = writer_of(tmp_path)
        put = asyncio.create_task(writer.put(group_rows(0)))
        await asyncio.sleep(0)
        await asyncio.wait_for(writer.close(), SOON_S)
        assert put.done() and put.exception() is None

    asyncio.run(body())
