"""Token in, token out: budgets, aborts, failures of engines, and seeds."""

import asyncio
from typing import Any

import pytest

from slime_core.engines.client import EngineAnswerError, EngineDeadlineError, EngineUnreachableError
from slime_core.engines.protocol import GenerateRequest, Unread, parse_result
from slime_core.errors import DataError, DeadlineError, EngineError
from slime_core.rollout.gate import EngineGate
from slime_core.rollout.generate import Sampling, decode_response, generate, tokenize_prompt
from slime_core.sample import Sample, Span, Status

LIMIT = 6


class ScriptedEngine:
    """Answers each call by the next step of its script: an error, or (tokens, finish, version)."""

    def __init__(self, url: str, *script: Any) -> None:
        self.url = url
        self.script = list(script)
        self.calls: list[list[GenerateRequest]] = []

    async def close(self) -> None:
        return

    async def generate_batch(self, requests: list[GenerateRequest]) -> list[Any]:
        self.calls.append(requests)
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        count, finish, version = step
        return [answer(request, count, finish, version) for request in requests]

    async def generate_unread(self, requests: list[GenerateRequest]) -> Unread:
        results = await self.generate_batch(requests)
        return Unread(lambda: results)


def answer(request: GenerateRequest, count: int, finish: str, version: str) -> Any:
    count = min(count, request.sampling["max_new_tokens"])
    tokens = list(range(count))
    return parse_result(
        {
            "output_ids": tokens,
            "meta_info": {
                "id": "r",
                "finish_reason": {"type": finish},
                "weight_version": version,
                "output_token_logprobs": [[-0.5, token, None] for token in tokens],
                "prompt_tokens": len(request.tokens),
            },
        }
    )


def prompt(index: int = 0) -> Sample:
    return Sample(group_index=3, index=index, tokens=[7, 8])


def run(engines: list[ScriptedEngine], samples: list[Sample], timeout_s: float = 5.0) -> EngineGate:
    by_url: dict[str, Any] = {engine.url: engine for engine in engines}

    async def body() -> EngineGate:
        gate = EngineGate(lambda url: by_url[url], 64)
        await gate.set_engines(list(by_url))
        await gate.open()
        seeds = lambda sample: 100 * sample.index + sample.response_length  # noqa: E731
        await generate(samples, gate, Sampling(LIMIT, {"top_p": 0.9}, timeout_s), seeds)
        return gate

    return asyncio.run(body())


def test_samples_of_a_group_go_out_together_with_parameters_and_seeds():
    engine = ScriptedEngine("a", (3, "stop", "l0-1"))
    samples = [prompt(0), prompt(1)]
    run([engine], samples)
    (requests,) = engine.calls
    assert [request.sampling["sampling_seed"] for request in requests] == [0, 100]
    assert all(request.sampling["max_new_tokens"] == LIMIT for request in requests)
    assert all(request.sampling["top_p"] == 0.9 for request in requests)
    for sample in samples:
        assert sample.tokens == [7, 8, 0, 1, 2] and sample.status is Status.COMPLETED
        assert sample.rollout_log_probs == [-0.5] * 3
        assert sample.spans == [Span(0, 3, "l0-1")]


def test_an_aborted_sample_goes_on_with_what_is_left_of_its_budget():
    engine = ScriptedEngine("a", (4, "abort", "l0-1"), (9, "length", "l0-2"))
    sample = prompt()
    run([engine], [sample])
    second = engine.calls[1][0]
    assert list(second.tokens) == [7, 8, 0, 1, 2, 3], "the continuation's prompt holds the prefix"
    assert second.sampling["max_new_tokens"] == LIMIT - 4
    assert second.sampling["sampling_seed"] == 4, "a continuation has a seed of its own"
    assert sample.spans == [Span(0, 4, "l0-1"), Span(4, 2, "l0-2")]
    assert sample.response_length == LIMIT and sample.status is Status.TRUNCATED
    assert sample.weight_versions == ["l0-1", "l0-2"]


def test_an_abort_at_the_very_end_is_a_truncated_sample():
    engine = ScriptedEngine("a", (LIMIT, "abort", "v"))
    sample = prompt()
    run([engine], [sample])
    assert sample.status is Status.TRUNCATED and len(engine.calls) == 1


def test_only_unfinished_samples_go_out_again():
    class OneAborts(ScriptedEngine):
        async def generate_batch(self, requests: list[GenerateRequest]) -> list[Any]:
            self.calls.append(requests)
            if len(self.calls) == 1:
                return [answer(requests[0], 2, "stop", "v"), answer(requests[1], 1, "abort", "v")]
            return [answer(request, 2, "stop", "v") for request in requests]

    engine = OneAborts("a")
    samples = [prompt(0), prompt(1)]
    run([engine], samples)
    assert [len(call) for call in engine.calls] == [2, 1]
    assert [sample.response_length for sample in samples] == [2, 3]


@pytest.mark.parametrize(
    "failure",
    [EngineUnreachableError("a", "broken pipe"), EngineAnswerError("a", 503, "no memory")],
)
def test_a_failed_engine_is_marked_and_another_one_gets_the_same_request(failure):
    bad, good = ScriptedEngine("a", failure), ScriptedEngine("b", (2, "stop", "v"))
    sample = prompt()
    gate = run([bad, good], [sample])
    assert len(bad.calls) == 1, "of idle engines the first one listed is taken"
    assert bad.calls == good.calls, "the same tokens, parameters and seed"
    assert list(gate.down) == ["a"]
    assert sample.status is Status.COMPLETED


def test_a_refused_request_is_the_requests_fault():
    engine = ScriptedEngine("a", EngineAnswerError("a", 400, "too long"))
    with pytest.raises(EngineError, match="too long"):
        run([engine], [prompt()])


def test_a_hung_engine_is_marked_for_the_supervisor():
    by_url: dict[str, Any] = {"a": ScriptedEngine("a", EngineDeadlineError("a", 1.0))}

    async def body() -> dict[str, str]:
        gate = EngineGate(lambda url: by_url[url], 64)
        await gate.set_engines(["a"])
        await gate.open()
        with pytest.raises(DeadlineError):
            await generate([prompt()], gate, Sampling(LIMIT, {}, 5.0), lambda _: 0)
        return gate.down

    assert list(asyncio.run(body())) == ["a"]


def test_without_any_engine_the_wait_ends_with_what_became_of_them():
    bad = ScriptedEngine("a", EngineUnreachableError("a", "gone"))
    with pytest.raises(DeadlineError, match="a is down: a cannot be reached: gone"):
        run([bad], [prompt()], timeout_s=0.2)


def test_a_finished_sample_asks_for_nothing():
    sample = prompt()
    sample.status = Status.COMPLETED
    engine = ScriptedEngine("a")
    run([engine], [sample])
    assert engine.calls == []


class Letters:
    """A tokenizer of single characters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens is False, "a template or the prompt itself brings them"
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in ids)


def test_prompts_are_tokenized_once_and_never_empty():
    sample = Sample(group_index=1, prompt="ab")
    tokenize_prompt(sample, Letters())
    assert sample.tokens == [97, 98]
    sample.prompt = "xyz"
    tokenize_prompt(sample, Letters())
    assert sample.tokens == [97, 98]
    with pytest.raises(DataError, match="group 1: the prompt has no tokens"):
        tokenize_prompt(Sample(group_index=1, prompt=""), Letters())
    with pytest.raises(DataError, match="apply_chat_template"):
        tokenize_prompt(Sample(group_index=1, prompt=[{"role": "user"}]), Letters())


def test_the_response_text_comes_from_its_tokens():
    sample = Sample(tokens=[97, 98, 99], response_length=2)
    decode_response(sample, Letters(), False)
    assert sample.response == "bc"
    empty = Sample(tokens=[97])
    decode_response(empty, Letters(), False)
    assert empty.response == ""


def test_a_late_answer_names_the_group():
    class Slow(ScriptedEngine):
        async def generate_batch(self, requests: list[GenerateRequest]) -> list[Any]:
            await asyncio.Event().wait()
            return []

    with pytest.raises(DeadlineError, match="generation of group 3"):
        run([Slow("a")], [prompt()], timeout_s=0.05)


def stopped_after(calls: int, engine: ScriptedEngine, samples: list[Sample]) -> None:
    """Generates until the engine was called so often, then is told to stop."""

    async def body() -> None:
        gate = EngineGate(lambda url: engine, 64)  # type: ignore[arg-type,return-value]
        await gate.set_engines([engine.url])
        await gate.open()
        stopping = lambda: len(engine.calls) >= calls  # noqa: E731
        await generate(samples, gate, Sampling(LIMIT, {}, 5.0), lambda s: 0, stopping)

    asyncio.run(body())


def test_once_told_to_stop_no_request_leaves_and_what_is_there_stays():
    engine, sample = ScriptedEngine("a", (2, "abort", "l0-1"), (2, "stop", "l0-1")), prompt()
    stopped_after(1, engine, [sample])
    assert len(engine.calls) == 1 and sample.status is Status.ABORTED
    assert (sample.response_length, sample.spans) == (2, [Span(0, 2, "l0-1")])
    untouched = prompt()
    stopped_after(0, ScriptedEngine("a"), [untouched])
    assert untouched.status is Status.PENDING and not untouched.response_length


def test_prompt_and_response_together_are_limited_too():
    limits = Sampling(LIMIT, {}, 5.0, max_context_tokens=5)
    assert limits.left(prompt()) == 3
    assert Sampling(2, {}, 5.0, max_context_tokens=50).left(prompt()) == 2


def test_messages_are_rendered_where_a_function_takes_them(monkeypatch):
    monkeypatch.setattr("slime_core.rollout.generate.render_chat", lambda *_, **__: "ab")
    sample = Sample(prompt=[{"role": "user", "content": "x"}])
    tokenize_prompt(sample, Letters(), chat=True)
    assert sample.tokens == [97, 98] and isinstance(sample.prompt, list)
