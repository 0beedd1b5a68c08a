"""Trainer ranks as plain processes of this machine, for work that needs no Ray."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from slime_core.errors import SlimeError, TrainerError
from slime_core.megatron.settings import TrainerSettings
from slime_core.waits import Deadline

PR_SET_PDEATHSIG = 1
END_S = 5.0


class RankProcesses:
    """All ranks addressed as one, as run.replay.Rank. An error of one of them ends all.

    Args:
        settings: of each rank.
        timeout_s: deadline of any call.
    """

    def __init__(self, settings: Sequence[TrainerSettings], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        context = get_context("spawn")
        for one in settings:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, one), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def setup(self) -> dict[str, Any]:
        return self._all("setup")

    def set_state(self, state: str) -> None:
        self._all("set_state", state)

    def load(self, directory: str) -> dict[str, Any]:
        return self._all("load", directory)

    def save(self, directory: str) -> None:
        self._all("save", directory)

    def export_hf(self, directory: str, version: str) -> dict[str, Any]:
        return self._all("export_hf", directory, version)

    def train(
        self, epoch: int, expect: str, next_state: str, batch_digest: str, batch: Any, seed: int,
        forced_skips: Sequence[bool] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        return self._all(
            "train", epoch, expect, next_state, batch_digest, batch, seed, forced_skips
        )

    def probe(self, batch: Any, seed: int) -> dict[str, Any]:
        return self._all("probe", batch, seed)

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join(END_S)
        self._connections, self._processes = [], []

    def _all(self, method: str, *args: Any) -> Any:
        """Calls a method of every rank; returns the first one's answer.

        Raises:
            SlimeError: what a rank raised.
            TrainerError: a rank failed otherwise, or ended.
            DeadlineError: not all answered in time.
        """
        deadline = Deadline(f"the {method} of {len(self._processes)} ranks", self._timeout_s)
        try:
            for rank in range(len(self._connections)):
                self._ask(rank, method, args)
            return self._answers(method, deadline)[0]
        except BaseException:
            self.close()
            raise

    def _ask(self, rank: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            self._connections[rank].send((method, args))
        except ConnectionError as error:
            raise _ended(rank, method) from error

    def _answers(self, method: str, deadline: Deadline) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(self._connections):
            waiting = [c for i, c in enumerate(self._connections) if i not in answers]
            for ready in wait(waiting, deadline.remaining_s):
                rank = self._connections.index(ready)  # type: ignore[arg-type]
                try:
                    failed, answers[rank] = self._connections[rank].recv()
                except (EOFError, ConnectionError) as error:
                    raise _ended(rank, method) from error
                if failed:
                    raise answers[rank]
            deadline.check()
        return [answers[rank] for rank in sorted(answers)]


def _ended(rank: int, method: str) -> TrainerError:
    return TrainerError(f"rank {rank} ended during {method}: killed, or out of memory?")


def _serve(connection: Connection, settings: TrainerSettings) -> None:
    """Runs in a process of its own, which ends with the one that asked for it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asked ends this process
    from slime_core.megatron.rank import TrainerRank

    rank = TrainerRank(settings)
    while True:
        try:
            method, args = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = (False, getattr(rank, method)(*args))
        except SlimeError as error:
            answer = (True, error)
        except Exception as error:  # told to whoever asked
            text = f"rank {settings.rank}, {method}: {type(error).__name__}: {error}"
            answer = (True, TrainerError(text))
        try:
            connection.send(answer)
        except BrokenPipeError:  # another rank has failed, and nobody asks for more
            return
