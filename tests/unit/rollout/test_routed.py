"""Routes of tokens are asked for, and each token keeps those that it was sampled with."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime_core.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    Unread,
    generate_body,
    parse_result,
)
from slime_core.errors import EngineError
from slime_core.rollout.generate import Sampling, generate
from slime_core.rollout.routed import RouteAsk
from slime_core.rollout.runtime import Runtime
from slime_core.rollout.turns import Turns
from slime_core.sample import Sample, Status
from tests.unit.rollout.scripted import Characters

LAYERS, K = 2, 3
ASK = RouteAsk(LAYERS, K)


def rows(*versions: int) -> np.ndarray:
    """[tokens, layers, k]: all numbers of a token tell its place and the version of the weights."""
    told = [100 * version + at for at, version in enumerate(versions)]
    return np.array(told, np.int32)[:, None, None] * np.ones((LAYERS, K), np.int32)


class Engine:
    """Gives as many tokens as its script says and how it ends; each answer has newer weights."""

    url = "routed"

    def __init__(self, *script: tuple[int, str], tells: bool = True) -> None:
        self.script, self.tells = list(script), tells
        self.starts: list[Any] = []
        self.version = 0

    @asynccontextmanager
    async def engine(self, *_: Any, **__: Any):
        yield self

    async def generate_raw(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        return self._answer(body)

    async def generate_batch(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        self.version += 1
        return [parse_result(self._answer(generate_body(one))) for one in requests]

    async def generate_unread(self, requests: list[GenerateRequest]) -> Unread:
        results = await self.generate_batch(requests)
        return Unread(lambda: results)

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        count, end = self.script.pop(0)
        self.starts.append(body.get("routed_experts_start_len"))
        meta: dict[str, Any] = {
            "id": "r", "finish_reason": {"type": end}, "weight_version": f"v-{self.version}",
            "output_token_logprobs": [[-0.5, 97, None]] * count,
        }  # fmt: skip
        if body.get("return_routed_experts") and self.tells:
            told = rows(*[self.version] * (len(body["input_ids"]) + count - 1))
            told = told[body["routed_experts_start_len"] :]
            meta["routed_experts"] = base64.b64encode(told.tobytes()).decode()
        return {"text": "a" * count, "output_ids": [97] * count, "meta_info": meta}


def prompt(tokens: int) -> Sample:
    return Sample(group_index=1, index=0, tokens=[1] * tokens)


def answered(engine: Engine, *samples: Sample, routes: RouteAsk | None = ASK) -> None:
    sampling = Sampling(16, {}, 5.0, routes=routes)
    asyncio.run(generate(samples, engine, sampling, lambda _: 0))  # type: ignore[arg-type]


def test_what_goes_on_under_newer_weights_keeps_the_routes_that_it_has():
    one, two = prompt(2), prompt(4)
    engine = Engine((3, "abort"), (1, "abort"), (2, "stop"), (0, "abort"), (1, "stop"))
    answered(engine, one, two)
    assert engine.starts == [0, 0, 4, 4, 4], "one start for all requests of a call"
    want = rows(1, 1, 1, 1, 2, 2)
    assert (one.rollout_routed_experts == want).all() and len(one.tokens) == 7
    assert (two.rollout_routed_experts == rows(1, 1, 1, 1, 3)).all() and len(two.tokens) == 6


def test_of_requests_with_several_starts_each_takes_its_own_part():
    far, near = prompt(2), prompt(2)
    answered(Engine((4, "abort"), (1, "stop")), far)
    far.status = Status.ABORTED
    answered(engine := Engine((2, "stop"), (1, "stop")), far, near)
    assert engine.starts == [0, 0]
    assert (far.rollout_routed_experts == rows(1, 1, 1, 1, 1, 2, 1, 1)).all()
    assert (near.rollout_routed_experts == rows(1, 1)).all()


def test_nothing_is_asked_for_unless_it_is_wanted():
    sample = prompt(2)
    answered(engine := Engine((2, "stop")), sample, routes=None)
    assert engine.starts == [None] and sample.rollout_routed_experts is None


@pytest.mark.parametrize("ask", [ASK, RouteAsk(LAYERS, 2)])
def test_an_engine_that_tells_no_routes_is_named(ask: RouteAsk):
    with pytest.raises(EngineError, match=r"told no routed_experts, .* enable_return_routed_expe"):
        answered(Engine((2, "stop"), tells=False), prompt(2), routes=ask)
    other = {"routed_experts": np.zeros(7, np.int32)}
    held = prompt(4)
    held.rollout_routed_experts = np.zeros((2, LAYERS, K), np.int32)
    with pytest.raises(EngineError, match="not those of a model with 2 layers"):
        ask.told(held, {"routed_experts_start_len": 0}, other)


def test_turns_ask_for_what_comes_after_the_turn_before():
    """Also for an answer that was cut off and goes on, whose parts come as one."""
    engine = Engine((2, "stop"), (2, "abort"), (1, "stop"))
    args, tokenizer = SimpleNamespace(), Characters()
    runtime = Runtime(
        args=args, tokenizer=tokenizer, gate=engine, hub=None,  # type: ignore[arg-type]
        sampling=Sampling(16, {}, 5.0, routes=ASK), seed_of=lambda _: 0, stopping=lambda: False,
    )  # fmt: skip

    async def talk() -> Sample:
        turns = Turns(runtime, prompt(3))
        await turns.answer()
        turns.put("bcd")
        await turns.answer()
        return turns.sample

    sample = asyncio.run(talk())
    assert engine.starts == [0, 4, 9]
    assert len(sample.tokens) == 11
    assert (sample.rollout_routed_experts == rows(1, 1, 1, 1, 2, 2, 2, 2, 2, 3)).all()
