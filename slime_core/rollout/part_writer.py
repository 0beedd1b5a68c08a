"""Writes finished groups into parts; a group counts as finished once its part is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from slime_core.run import faults
from slime_core.store.backend import Backend
from slime_core.store.cache import NodeCache
from slime_core.store.parts import GroupRows, write_part

LINGER_S = 0.2
"""How long a group waits for others to share its part. A part of one costs as much CPU as six."""

Waiting = tuple[GroupRows, asyncio.Future[None]]


@dataclass(frozen=True)
class PartTarget:
    """Where parts go.

    Attributes:
        segment: their segment.
        epoch: the owner's, part of each name.
        hold_after: groups after which a test may hold the process (generate-middle).
    """

    backend: Backend
    cache: NodeCache
    segment: int
    epoch: int
    hold_after: int


class PartWriter:
    """One writing task a segment. Whatever finished while it wrote goes into the next part, with
    what comes soon after as long as more is expected.

    Args:
        target: where parts go.
        next_seq: the worker's part counter.
    """

    def __init__(self, target: PartTarget, next_seq: Callable[[], int]) -> None:
        self._target = target
        self._next_seq = next_seq
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._acknowledged = 0
        self._expected = 0
        self._putting = 0
        self._hurried = False
        self._all_there = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"parts {target.segment}")

    async def put(self, group: GroupRows) -> None:
        """Returns once the store has acknowledged the group's part.

        Raises:
            StoreError: the store refused it.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._putting += 1
        try:
            self._queue.put_nowait((group, done))
            self._look()
            await done
        finally:
            self._putting -= 1
            self._look()

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Inside of it a group is made that will likely be put."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1
            self._look()

    def hurry(self) -> None:
        """No group lingers any more: the segment may be decided by each."""
        self._hurried = True
        self._look()

    def _look(self) -> None:
        # The second: every group there is waits for its part.
        if self._hurried or self._putting >= self._expected:
            self._all_there.set()
        else:
            self._all_there.clear()

    async def close(self) -> None:
        """Writes what was put before, then ends the task."""
        self.hurry()
        written = asyncio.ensure_future(self._queue.join())
        await asyncio.wait({written, self._task}, return_when=asyncio.FIRST_COMPLETED)
        for task in (written, self._task):
            task.cancel()
        await asyncio.gather(written, self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            waiting = [await self._queue.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await self._all_there.wait()
            while not self._queue.empty() and len(waiting) < self._most():
                waiting.append(self._queue.get_nowait())
            await self._write(waiting)

    def _most(self) -> int:
        """Groups of one part; fewer when a test wants to see the middle of a segment."""
        held = faults.armed("generate-middle", self._target.segment)
        return max(1, self._target.hold_after) if held else 4096

    async def _write(self, waiting: list[Waiting]) -> None:
        target = self._target
        groups = [group for group, _ in waiting]
        try:
            await asyncio.to_thread(
                write_part, target.backend, target.segment, target.epoch, self._next_seq(),
                groups, target.cache,
            )  # fmt: skip
        except Exception as error:  # handed to every group that waits for this part
            for done in _awaited(waiting):
                done.set_exception(error)
            return
        finally:
            for _ in waiting:
                self._queue.task_done()
        for done in _awaited(waiting):
            done.set_result(None)
        self._acknowledged += len(waiting)
        if self._acknowledged >= target.hold_after:
            faults.hold("generate-middle", target.segment)


def _awaited(waiting: list[Waiting]) -> list[asyncio.Future[None]]:
    """The answers somebody still waits for; a cancelled group does not."""
    return [done for _, done in waiting if not done.done()]
