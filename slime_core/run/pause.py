"""What a run does while its store is away: it waits, says why, and goes on by itself.

Throttling, outages, credentials that have expired and full disks pass without a change of the run.
Whatever was not acknowledged when they came is done again afterwards, so nothing is half-committed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from slime_core.errors import AwayError, UnavailableError
from slime_core.run.process import ProcessIdentity, own_identity
from slime_core.store.backend import open_backend
from slime_core.store.probe import check_room, check_usable
from slime_core.waits import Deadline, beside

log = logging.getLogger(__name__)
T = TypeVar("T")
FILE = "paused.json"
ROOM_BYTES = 4096
"""The note's file has its size from the start: a full disk could not take it later."""
CAUSE_CHARACTERS = 600
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
PROBE_PATIENCE_S = 10.0
MOST_DOUBLINGS = 10


@dataclass(frozen=True)
class Pause:
    """A run that waits for its store.

    Attributes:
        owner: its process.
        doing: what could not be done, for example `generate 000012`.
        cause: what the store said, with what would help.
        since_s, until_s: Unix times of its begin, and of its end where the store stays away.
    """

    run_id: str
    owner: ProcessIdentity
    doing: str
    cause: str
    since_s: float
    until_s: float

    def describe(self) -> str:
        """One sentence for a person."""
        until = time.strftime("%H:%M:%S", time.localtime(self.until_s))
        return (
            f"paused at {self.doing}: {self.cause}. It goes on by itself when the store answers, "
            f"and ends at {until} if it does not (--store-pause-s)"
        )


class Patience:
    """Does things again that failed because the store was away.

    Args:
        run_id: the run.
        url: of the run's prefix in the store.
        local: the run's folder on this machine; `slime status` finds the note there.
        longest_s: how long the pauses of one piece of work may be together.
        tell: shows a pause, or with None its end.
    """

    def __init__(
        self,
        run_id: str,
        url: str,
        local: Path,
        longest_s: float,
        tell: Callable[[Pause | None], Awaitable[None]],
    ) -> None:
        self._run_id = run_id
        self._url = url
        self._note = local / FILE
        self._longest_s = longest_s
        self._tell = tell
        try:
            self._note.write_bytes(b" " * ROOM_BYTES)
        except OSError as error:
            log.warning("`slime status` will not tell of a pause: %s", error)

    async def bear(self, doing: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of work that may be done again.

        Raises:
            AwayError: the store was away for longer than the longest pause.
        """
        waited_s, waits = 0.0, 0
        while True:
            try:
                return await work()
            except AwayError as error:
                began_s = time.monotonic()
                waits = await self._until_back(doing, error, self._longest_s - waited_s, waits)
                waited_s += time.monotonic() - began_s

    async def _until_back(self, doing: str, error: AwayError, left_s: float, waits: int) -> int:
        """Waits longer and longer until the store can be used; returns how often so far, so that
        a store that comes and goes is not asked all the time."""
        now_s = time.time()
        cause = str(error)[:CAUSE_CHARACTERS]
        pause = Pause(self._run_id, own_identity(), doing, cause, now_s, now_s + left_s)
        deadline = Deadline("the store", left_s)
        with self._noted(pause):
            if left_s > 0:
                log.warning("%s", pause.describe())
                await self._tell(pause)
            while True:
                wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**waits) * random.uniform(0.5, 1.0)
                waits = min(waits + 1, MOST_DOUBLINGS)
                if deadline.remaining_s < wait_s:
                    raise UnavailableError(self._gave_up(cause)) from error
                await asyncio.sleep(wait_s)
                try:
                    await beside("probe the store", self._probe)
                    break
                except AwayError as still:
                    log.info("still paused: %s", still)
        log.warning("%s goes on after a pause of %.0f s", doing, time.time() - now_s)
        await self._tell(None)
        return waits

    def _probe(self) -> None:
        check_room(self._note.parent)  # the workspace's disk may be the one that is full
        check_usable(open_backend(self._url, patience_s=PROBE_PATIENCE_S))

    def _gave_up(self, cause: str) -> str:
        if not self._longest_s:
            return f"{cause}; the same command goes on when the store can be used"
        return (
            f"{cause}; the store was away for the longest pause (--store-pause-s "
            f"{self._longest_s:g}): the same command goes on when it can be used"
        )

    @contextmanager
    def _noted(self, pause: Pause) -> Iterator[None]:
        """Keeps a note of the pause while it lasts."""
        self._write(json.dumps(asdict(pause), ensure_ascii=False))
        try:
            yield
        finally:
            self._write("")

    def _write(self, text: str) -> None:
        """Overwrites the note in place, which needs no space."""
        try:
            with self._note.open("r+b") as file:
                file.write(text.encode(errors="replace").ljust(ROOM_BYTES))
        except OSError as error:
            log.warning("`slime status` cannot tell of the pause: %s", error)


def paused_runs(workspace: Path) -> list[Pause]:
    """The runs of a workspace that wait for their store, without asking that store."""
    found = [_read(path) for path in sorted(workspace.glob(f"local/*/{FILE}"))]
    return [pause for pause in found if pause is not None and not pause.owner.is_gone()]


def _read(path: Path) -> Pause | None:
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        return Pause(**{**note, "owner": ProcessIdentity(**note["owner"])})
    except (OSError, ValueError, TypeError):
        return None  # there is none, or it is being written
