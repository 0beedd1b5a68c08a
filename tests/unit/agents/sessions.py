"""Sessions on a scripted engine, without HTTP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from slime_core.agents.requests import parse_request
from slime_core.agents.session import Session
from slime_core.agents.turn_log import RecordedTurn
from slime_core.rollout.generate import Sampling
from slime_core.rollout.runtime import Runtime
from slime_core.sample import Sample
from tests.unit.rollout.scripted import Characters, Script


class Notebook:
    """A turn log in memory."""

    def __init__(self, earlier: list[RecordedTurn] | None = None) -> None:
        self.turns = list(earlier or [])

    def earlier(self) -> list[RecordedTurn]:
        return list(self.turns)

    def put(self, turn: RecordedTurn) -> None:
        self.turns.append(turn)


def runtime(script: Any, limit: int = 500, tokenizer: Any = None, **changes: Any) -> Runtime:
    args = {"max_turns": 9, "tool_parser": "auto", **changes}
    return Runtime(
        SimpleNamespace(**args), tokenizer or Characters(), script, None,  # type: ignore[arg-type]
        Sampling(limit, {"temperature": 1.0}, 5.0),
        seed_of=lambda sample: sample.response_length,
    )  # fmt: skip


async def opened(
    there: Runtime, log: Notebook | None = None, index: int = 0, **params: Any
) -> Session:
    if log is not None:
        there.turn_log = lambda sample, ordinal: log  # type: ignore[return-value,assignment]
    sample = Sample(group_index=0, index=index, prompt="q", tokens=[1], metadata={"from": "row"})
    session = Session(there, sample, {"temperature": 1.0, **params})
    await session.open()
    return session


async def say(session: Session, *messages: Any, repeated: bool = False, **more: Any) -> Any:
    """Asks with (role, text) pairs or messages; returns the answer."""
    said = [{"role": m[0], "content": m[1]} if isinstance(m, tuple) else m for m in messages]
    return await session.complete(parse_request({"messages": said, **more}), "m", repeated)


def text_of(sample: Sample) -> str:
    return Characters().decode(sample.tokens)


__all__ = ["Notebook", "Script", "opened", "runtime", "say", "text_of"]
