"""A pool of killable processes that run graders, each grading under a hard deadline.

A grader may hang, fork, exit, eat memory or crash: it costs the one sample it was grading a typed
answer; its process is ended with all its children and replaced, and waiting samples go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import psutil

from slime_core.errors import RewardError
from slime_core.waits import within

MAX_BATCH = 64
ANSWER_LIMIT_BYTES = 64 << 20
MARK = "SLIME_GRADER_PROCESS"
BROKEN = (TimeoutError, OSError, EOFError, ValueError, TypeError, KeyError)


@dataclass(frozen=True)
class Answer:
    """What a worker said about one item: a value, or a reason (result.REASONS) and a message,
    with the places in the code (a traceback's frames) where the grader raised something."""

    value: Any = None
    reason: str | None = None
    message: str = ""
    trace: str = ""


@dataclass(frozen=True)
class PoolSettings:
    """Limits of the pool.

    Attributes:
        workers: processes at most; they start when they are first needed.
        grace_s: how long past an item's own deadline its process may live.
        start_timeout_s: how long starting a process and importing a grader may take.
        memory_bytes: address space of each process, 0 for no limit.
    """

    workers: int = 1
    grace_s: float = 1.0
    start_timeout_s: float = 60.0
    memory_bytes: int = 4 << 30


@dataclass
class _Call:
    target: str
    args: dict[str, Any] | None
    item_json: str
    timeout_s: float
    future: asyncio.Future[Answer]

    @property
    def key(self) -> tuple[str, int, float]:
        """Calls with the same key may share a request."""
        return (self.target, id(self.args), self.timeout_s)

    def settle(self, answer: Answer) -> None:
        if not self.future.done():
            self.future.set_result(answer)


def _fail(calls: Iterable[_Call], message: str) -> None:
    for call in calls:
        call.settle(Answer(reason="crash", message=message))


class GraderPool:
    """Runs graders in child processes. It belongs to the event loop that first uses it."""

    def __init__(self, settings: PoolSettings | None = None) -> None:
        self.settings = settings or PoolSettings()
        self.restarts = 0
        self._calls: deque[_Call] = deque()
        self._waiting = asyncio.Semaphore(0)
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def grade(
        self,
        target: str,
        item: list[Any],
        timeout_s: float,
        args: dict[str, Any] | None = None,
    ) -> Answer:
        """Grades one item.

        Args:
            target: `grader:NAME` for a built-in, `custom:IMPORT_PATH` for a user's function.
            item: arguments of the function, as JSON can carry them.
            timeout_s: deadline of the grading alone; waiting and imports do not count.
            args: settings handed to a user's function.

        Raises:
            RewardError: the pool is closed.
        """
        if self._closed:
            raise RewardError("the grader pool is closed")
        try:
            item_json = _as_json(item)
        except (ValueError, TypeError, RecursionError) as error:
            return Answer(reason="exception", message=f"cannot be sent to a grader: {error}")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls.append(_Call(target, args, item_json, timeout_s, future))
        self._waiting.release()
        if len(self._tasks) < self.settings.workers:
            self._tasks.append(asyncio.create_task(self._serve(), name="grader worker"))
        return await future

    async def close(self) -> None:
        """Ends all processes; waiting calls fail as crashed."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        _fail(self._calls, "the grader pool was closed")
        self._calls.clear()

    async def _serve(self) -> None:
        """One worker: takes calls that fit together, and replaces its process when it dies."""
        process: _Process | None = None
        try:
            while True:
                await self._waiting.acquire()
                batch = self._take()
                if not batch:
                    continue
                process = process or _Process(self.settings)
                rest = await self._run(process, batch)
                if process.dead:
                    process = None
                    self.restarts += 1
                self._calls.extendleft(reversed(rest))
                for _ in rest:
                    self._waiting.release()
        finally:
            if process is not None:
                await process.kill()

    async def _run(self, process: _Process, batch: list[_Call]) -> list[_Call]:
        try:
            return await process.run(batch)
        except asyncio.CancelledError:
            _fail(batch, "the grader pool was closed")
            raise
        except Exception as error:
            await process.kill()
            _fail(batch, f"the grader pool failed: {error!r}")
            return []

    def _take(self) -> list[_Call]:
        """The next calls that share a key, at most this worker's fair part of the queue."""
        batch: list[_Call] = []
        fair = -(-len(self._calls) // self.settings.workers)
        while self._calls and len(batch) < min(MAX_BATCH, fair):
            if self._calls[0].future.done():  # Cancelled by its caller.
                self._calls.popleft()
                continue
            if batch and self._calls[0].key != batch[0].key:
                break
            batch.append(self._calls.popleft())
        return batch


class _Process:
    """One child process and the conversation with it."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._child: asyncio.subprocess.Process | None = None
        self._mark = uuid.uuid4().hex
        self.dead = False

    async def run(self, batch: Sequence[_Call]) -> list[_Call]:
        """Grades a batch, settling calls one by one; returns those that were not begun."""
        first = batch[0]
        head = json.dumps(
            {"target": first.target, "args": first.args, "timeout_s": first.timeout_s}
        )
        items = ",".join(call.item_json for call in batch)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._send(f'{head[:-1]}, "items": [{items}]}}\n'.encode())
                ready = await self._receive()
        except BROKEN as error:
            await self.kill()
            first.settle(Answer(reason="crash", message=f"the grader did not start: {error!r}"))
            return list(batch[1:])
        if not ready["ready"]:
            for call in batch:
                call.settle(Answer(reason="exception", message=ready["message"]))
            return []
        for done, call in enumerate(batch, 1):
            answer = await self._answer(call.timeout_s + self._settings.grace_s)
            if self.dead:
                await self.kill()
            call.settle(answer)
            if self.dead:
                return list(batch[done:])
        return []

    async def _answer(self, limit_s: float) -> Answer:
        """The next answer; without one within the limit the process counts as dead."""
        # The second, short wait is for a loop that was busy while the answer came in time.
        for wait_s in (limit_s, 0.1):
            try:
                async with asyncio.timeout(wait_s):
                    return Answer(**await self._receive())
            except TimeoutError:
                continue
            except BROKEN:
                self.dead = True
                return Answer(reason="crash", message="its process ended in the middle")
        self.dead = True
        return Answer(reason="timeout", message=f"was killed after {limit_s:g} s")

    async def _send(self, line: bytes) -> None:
        if self._child is None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "slime_core.rewards.worker_main",
                str(self._settings.memory_bytes),
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=_environment(self._mark),
                start_new_session=True,
                limit=ANSWER_LIMIT_BYTES,
            )
        assert self._child.stdin is not None
        self._child.stdin.write(line)
        await self._child.stdin.drain()

    async def _receive(self) -> dict[str, Any]:
        assert self._child is not None and self._child.stdout is not None
        line = await self._child.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the process closed its output")
        return json.loads(line)

    async def kill(self) -> None:
        """Ends the child and everything it has started, by pid."""
        self.dead = True
        if self._child is None:
            return
        _end_family(self._child.pid, self._mark)
        await within("a killed grader process to end", 10, self._child.wait())


def _end_family(pid: int, mark: str) -> None:
    """Ends a process and all it has started, those included that left its tree or session.

    Each is stopped before the next look, so that nothing can be born in between.
    """
    family: dict[int, psutil.Process] = {}
    while new := [one for one in _relatives(pid, mark) if one.pid not in family]:
        for process in new:
            family[process.pid] = process
            with contextlib.suppress(psutil.Error):
                process.suspend()
    for process in family.values():
        with contextlib.suppress(psutil.Error):
            process.kill()


def _relatives(pid: int, mark: str) -> list[psutil.Process]:
    found = []
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        found = [parent, *parent.children(recursive=True)]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def _environment(mark: str) -> dict[str, str]:
    """The child finds the same modules, computes on one thread and hashes alike every time."""
    paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        MARK: mark,
    }


def _as_json(item: list[Any]) -> str:
    """A call's arguments. A long text in the first place is written ten times as fast by itself."""
    if item and isinstance(item[0], str):
        with contextlib.suppress(orjson.JSONEncodeError):  # a lone surrogate
            rest = json.dumps(item[1:], default=_jsonable)[1:]
            return f"[{orjson.dumps(item[0]).decode()}{', ' if len(item) > 1 else ''}{rest}"
    return json.dumps(item, default=_jsonable)


def _jsonable(value: Any) -> Any:
    """What JSON does not know: arrays become lists, everything else text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
