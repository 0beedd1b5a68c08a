"""Whose turn it is in the event loop: answers free their room before any of them is worked up."""

from __future__ import annotations

import asyncio
from collections import deque

MOST_AHEAD = 16
"""Answers that free their room, one after another, while another waits to be worked up."""


class Lanes:
    """Lets one answer go on in each pass of the event loop.

    Of many that come together the first would else be worked up to its end, and then the others,
    before a new request is on the wire; the engine's slots would stand empty meanwhile.
    """

    def __init__(self) -> None:
        self._to_leave: deque[asyncio.Future[None]] = deque()
        self._to_work_up: deque[asyncio.Future[None]] = deque()
        self._ahead = 0
        self._running = False

    async def to_leave(self) -> None:
        """Returns when the caller may free the room of its request, so that another one leaves."""
        await self._turn(self._to_leave)

    async def to_work_up(self) -> None:
        """Returns when nobody waits to free room, or some have since the last one's turn here."""
        await self._turn(self._to_work_up)

    async def _turn(self, lane: deque[asyncio.Future[None]]) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        lane.append(turn)
        if not self._running:
            self._running = True
            loop.call_soon(self._next, loop)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        for lane in (self._to_leave, self._to_work_up):
            while lane and lane[0].done():  # nobody waits any more
                lane.popleft()
        if self._to_leave and (self._ahead < MOST_AHEAD or not self._to_work_up):
            self._ahead = self._ahead + 1 if self._to_work_up else 0
            self._to_leave.popleft().set_result(None)
        elif self._to_work_up:
            self._ahead = 0
            self._to_work_up.popleft().set_result(None)
        else:
            self._running = False
            return
        loop.call_soon(self._next, loop)
