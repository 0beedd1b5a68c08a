"""What an engine cut off goes on from its tokens; what a stop cut off is no answer."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

from slime_core.rollout.generate import Sampling
from slime_core.rollout.runtime import Runtime

PIECES = [([7, 8], "abort"), ([9], "abort"), ([10, 11], "stop")]


class Engine:
    """Cuts answers off after some tokens."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.stop_after = stop_after

    @property
    def stopping(self) -> bool:
        return self.stop_after is not None and len(self.bodies) >= self.stop_after

    @asynccontextmanager
    async def engine(self, samples: int, wait_s: float, *, continues: bool = False, **_: Any):
        yield self

    async def generate_raw(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, end = PIECES[len(self.bodies)]
        self.bodies.append(body)
        return {
            "text": "".join(chr(96 + i) for i in ids), "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": end}, "weight_version": f"l0-{len(self.bodies)}",
                "output_token_logprobs": [[-0.1 * i, i, None] for i in ids],
                "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(ids),
            },
        }  # fmt: skip


def asked(engine: Engine, body: dict[str, Any]) -> tuple[dict[str, Any], Runtime]:
    runtime = Runtime(
        args=None, tokenizer=None, gate=engine, hub=None, sampling=Sampling(16, {}, 5.0),  # type: ignore
        seed_of=lambda _: 0, stopping=lambda: engine.stopping,
    )  # fmt: skip
    return asyncio.run(runtime.generate(body)), runtime


BODY = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8, "sampling_seed": 5}}


def test_a_cut_answer_goes_on_and_comes_as_one():
    engine = Engine()
    answer, runtime = asked(engine, BODY)
    assert answer["output_ids"] == [7, 8, 9, 10, 11] and answer["text"] == "ghijk"
    meta = answer["meta_info"]
    assert [pair[1] for pair in meta["output_token_logprobs"]] == [7, 8, 9, 10, 11]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, 5)
    assert meta["finish_reason"] == {"type": "stop"} and not runtime.cut
    assert [b["input_ids"] for b in engine.bodies] == [[1, 2], [1, 2, 7, 8], [1, 2, 7, 8, 9]]
    assert [b["sampling_params"]["max_new_tokens"] for b in engine.bodies] == [8, 6, 5]
    assert runtime.versions == ["l0-1", "l0-2", "l0-3"]


def test_after_a_stop_nothing_is_asked_and_the_rollout_knows():
    engine = Engine(stop_after=1)
    answer, runtime = asked(engine, BODY)
    assert (
        answer["output_ids"] == [7, 8] and answer["meta_info"]["finish_reason"]["type"] == "abort"
    )
    assert runtime.cut and len(engine.bodies) == 1


def test_a_request_by_text_is_given_back_as_it_was_cut():
    engine = Engine()
    body = {"text": "x", "input_ids": None, "sampling_params": {}}
    engine.generate_raw = _by_text(engine)  # type: ignore[method-assign]
    answer, runtime = asked(engine, body)
    assert answer["text"] == "half" and runtime.cut


def _by_text(engine: Engine):
    async def generate_raw(body: dict[str, Any]) -> dict[str, Any]:
        engine.bodies.append(body)
        return {"text": "half", "meta_info": {"finish_reason": {"type": "abort"}}}

    return generate_raw
