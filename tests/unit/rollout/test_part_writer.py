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


def test_a_group_waits_for_those_that_are_still_made_and_for_no_other(tmp_path, monkeypatch):
    """They share a part, which is written once nobody else can come."""
    monkeypatch.setattr(part_writer, "LINGER_S", 1000 * SOON_S)

    async def body() -> None:
        writer, ends = writer_of(tmp_path), asyncio.Event()

        async def made(group: int) -> None:
            with writer.expecting():
                await writer.put(group_rows(group))

        async def made_in_vain() -> None:
            with writer.expecting():
                await ends.wait()

        tasks = [asyncio.create_task(work) for work in (made_in_vain(), made(0))]
        for _ in range(20):
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(made(group)) for group in (1, 2)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not list_parts(target(tmp_path).cache, 2)[0]
        ends.set()
        await asyncio.wait_for(asyncio.gather(*tasks), SOON_S)
        await asyncio.wait_for(writer.put(group_rows(3)), SOON_S)
        await writer.close()

    asyncio.run(body())
    files, _ = list_parts(target(tmp_path).cache, 2)
    assert [[group.group_id for group in file.part.groups] for file in files] == [[0, 1, 2], [3]]


def test_no_group_lingers_once_each_may_decide_the_segment(tmp_path, monkeypatch):
    monkeypatch.setattr(part_writer, "LINGER_S", 1000 * SOON_S)

    async def body() -> None:
        writer = writer_of(tmp_path)
        with writer.expecting(), writer.expecting():
            put = asyncio.create_task(writer.put(group_rows(0)))
            await asyncio.sleep(0)
            writer.hurry()
            await asyncio.wait_for(put, SOON_S)
            await asyncio.wait_for(writer.put(group_rows(1)), SOON_S)
        await writer.close()

    asyncio.run(body())


def test_a_group_lingers_no_longer_than_it_may(tmp_path, monkeypatch):
    monkeypatch.setattr(part_writer, "LINGER_S", 0.01)

    async def body() -> None:
        writer = writer_of(tmp_path)
        with writer.expecting(), writer.expecting():
            await asyncio.wait_for(writer.put(group_rows(0)), SOON_S)
        await writer.close()

    asyncio.run(body())


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


def test_closing_writes_what_was_put_before(tmp_path, monkeypatch):
    monkeypatch.setattr(part_writer, "LINGER_S", 1000 * SOON_S)

    async def body() -> None:
        writer = writer_of(tmp_path)
        with writer.expecting(), writer.expecting():
            put = asyncio.create_task(writer.put(group_rows(0)))
            await asyncio.sleep(0)
            await asyncio.wait_for(writer.close(), SOON_S)
        assert put.done() and put.exception() is None

    asyncio.run(body())
