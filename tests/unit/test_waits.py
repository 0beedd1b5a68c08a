"""Work in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest

from slime_core.errors import DeadlineError, UnavailableError
from slime_core.waits import beside, within

SETTING: ContextVar[str] = ContextVar("setting", default="of nobody")


def test_work_beside_the_loop_gives_its_result_or_its_error():
    def fails() -> None:
        raise UnavailableError("away")

    assert asyncio.run(beside("count", lambda: 7)) == 7
    with pytest.raises(UnavailableError, match="away"):
        asyncio.run(beside("count", fails))


def test_work_beside_the_loop_sees_the_contexts_variables():
    async def ask() -> str:
        SETTING.set("of the task")
        return await beside("ask", SETTING.get)

    assert asyncio.run(ask()) == "of the task"


def test_the_loop_does_not_wait_at_its_end_for_work_that_nobody_waits_for():
    release, ended = threading.Event(), threading.Event()

    def work() -> None:
        release.wait(60)
        ended.set()

    with pytest.raises(DeadlineError, match="for the answer"):
        asyncio.run(within("the answer", 0.05, beside("ask", work)))
    [thread] = [one for one in threading.enumerate() if one.name == "ask"]
    assert not ended.is_set() and thread.daemon, "nor does the process"
    release.set()
    assert ended.wait(60)
