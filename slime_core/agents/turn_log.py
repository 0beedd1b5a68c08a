"""Turns of agents in the store, one document each, written before the agent sees the answer.

After a crash the agent of an unfinished group begins anew; what it asks again in the same words is
answered from here, token by token, so only the turn that was under way is generated again. When a
segment is sealed its groups hold all tokens, and these documents go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.documents import put_document, read_document


@dataclass(frozen=True)
class RecordedTurn:
    """What one turn gave.

    Attributes:
        asked: digest of the request (requests.ChatRequest.digest).
        context: how many tokens stood before the answer.
        put: token ids that were put behind the last answer for this turn.
        pieces: what engines sampled, in order: token ids, log-probs and the engine's meta_info. An
            answer that a weight update interrupted has several.
        message: the assistant's message as the agent got it.
        said: the messages of the request that were new, for reading.
    """

    asked: str
    context: int
    put: list[int]
    pieces: list[dict[str, Any]]
    message: dict[str, Any]
    said: list[dict[str, Any]]


class TurnLog:
    """The turns of one session.

    Args:
        session: what their names begin with (layout.session).
        epoch: the owner's number, part of each name, so that two owners never meet.
        earlier: names of the turns that owners before this one recorded, in order.
    """

    def __init__(
        self, backend: Backend, session: str, epoch: int, earlier: Sequence[str] = ()
    ) -> None:
        self._backend = backend
        self._session = session
        self._epoch = epoch
        self._earlier = earlier
        self._next = len(earlier)

    def earlier(self) -> list[RecordedTurn]:
        """What owners before this one recorded, in order."""
        found = (read_document(self._backend, key) for key in self._earlier)
        return [RecordedTurn(**document.body) for document in found]

    def put(self, turn: RecordedTurn) -> None:
        """Returns once the store has it. Raises StoreError."""
        key = layout.turn(self._session, self._next, self._epoch)
        self._next += 1
        put_document(self._backend, key, asdict(turn), {"epoch": self._epoch})


def recorded_turns(backend: Backend, segment: int) -> dict[str, list[str]]:
    """The names of all turns of a segment by session, in order."""
    found: dict[str, list[str]] = {}
    for entry in backend.list(layout.sessions(segment)):
        found.setdefault(layout.session_of_turn(entry.key), []).append(entry.key)
    return found


def forget_turns(backend: Backend, segment: int) -> None:
    """Removes the turns of a sealed segment."""
    for entry in backend.list(layout.sessions(segment)):
        backend.delete(entry.key)
