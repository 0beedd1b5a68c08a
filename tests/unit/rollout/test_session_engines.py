"""Conversations over two engines: spread, at home, and moved when their engine fails."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

from slime_core.engines.client import EngineUnreachableError
from slime_core.rollout.gate import EngineGate
from slime_core.rollout.generate import Sampling
from slime_core.rollout.runtime import Runtime
from tests.unit.agents.sessions import opened, say
from tests.unit.rollout.scripted import Characters


class Client:
    """Answers with its own name; `broken` ones are away."""

    broken: frozenset[str] = frozenset()

    def __init__(self, url: str) -> None:
        self.url = url

    async def generate_raw(self, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.url in self.broken:
            raise EngineUnreachableError(self.url, "gone")
        reason = {"type": "stop", "matched": 0}
        return {"text": self.url, "output_ids": [1], "meta_info": {"finish_reason": reason}}

    async def close(self) -> None: ...


def runtime(gate: EngineGate) -> Runtime:
    return Runtime(SimpleNamespace(), Characters(), gate, None,  # type: ignore[arg-type]
                   Sampling(9, {}, 5.0), lambda sample: 0)  # fmt: skip


def test_conversations_are_spread_and_each_stays_where_its_beginning_is():
    async def body() -> dict[str, list[str]]:
        gate = EngineGate(Client, 8)  # type: ignore[arg-type]
        await gate.set_engines(["a", "b"])
        await gate.open()
        there = runtime(gate)
        seen: dict[str, list[str]] = {str(i): [] for i in range(6)}

        async def turn(name: str) -> None:
            seen[name].append((await there.generate({"input_ids": [1]}, session=name))["text"])

        for order in (list(seen), list(seen)[::-1], list(seen)[2:] + list(seen)[:2]):
            await asyncio.gather(*(turn(name) for name in order))
        return seen

    seen = asyncio.run(body())
    assert all(len(set(engines)) == 1 for engines in seen.values()), seen
    assert Counter(engines[0] for engines in seen.values()) == {"a": 3, "b": 3}


def test_a_branch_begins_where_its_origin_was_answered():
    class Asked(Client):
        seen: ClassVar[list[str]] = []

        async def generate_raw(self, body: dict[str, Any]) -> dict[str, Any]:
            self.seen.append(self.url)
            pairs = [[-0.5, ord("x"), None], [-0.5, 0, None]]
            meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": pairs}
            return {"text": "x", "output_ids": [ord("x"), 0], "meta_info": meta}

    async def body() -> list[str]:
        gate = EngineGate(Asked, 8)  # type: ignore[arg-type]
        await gate.set_engines(["a", "b"])
        await gate.open()
        there = runtime(gate)
        there.args.max_turns = 9
        there.sampling = Sampling(99, {}, 5.0)
        session = await opened(there)
        said = (await say(session, ("user", "q"))).message
        async with gate.engine(2, 5.0, prefer="a"):  # so that the other one is less busy
            for more in ("one", "two", "three"):
                await say(session, ("user", "q"), said, ("user", more))
        return Asked.seen

    assert asyncio.run(body()) == ["a"] * 4


def test_a_conversation_moves_for_good_when_its_engine_is_gone(monkeypatch):
    async def body() -> list[str]:
        gate = EngineGate(Client, 8)  # type: ignore[arg-type]
        await gate.set_engines(["a", "b"])
        await gate.open()
        there = runtime(gate)

        async def turn() -> str:
            return (await there.generate({"input_ids": [1]}, session="s"))["text"]

        first = await turn()
        monkeypatch.setattr(Client, "broken", frozenset({first}))
        moved = await turn()
        monkeypatch.setattr(Client, "broken", frozenset())
        await gate.set_engines(["a", "b"])
        async with gate.engine(1, 5.0, prefer=moved):  # busier than the engine that came back
            return [first, moved, await turn()]

    first, moved, later = asyncio.run(body())
    assert moved == later != first
