"""/generate as SGLang serves it."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import pytest

from slime_core.engines.protocol import GenerateRequest
from tests.contracts.engines.conftest import (
    LONG,
    PROMPT,
    in_flight,
    requests_held,
    settled,
    slowed,
    until_idle,
)

GREEDY = {"max_new_tokens": 8, "temperature": 0}


async def post(http, **body):
    return await http.post("/generate", json=body)


async def ask(http, **body):
    answer = await post(http, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_shape_of_an_answer(play):
    async def scenario(client, http):
        body = await ask(http, input_ids=PROMPT, sampling_params=GREEDY, rid="shape")
        assert set(body) >= {"text", "output_ids", "meta_info"}
        meta = body["meta_info"]
        assert meta["id"] == "shape" and meta["prompt_tokens"] == 5
        assert meta["completion_tokens"] == len(body["output_ids"])
        assert meta["weight_version"] and meta["num_retractions"] == 0
        assert meta["finish_reason"]["type"] in ("stop", "length")
        assert "output_token_logprobs" not in meta
        assert isinstance(meta["cached_tokens"], int) and meta["e2e_latency"] > 0

    play(scenario)


def test_text_and_tokens_are_one(play):
    async def scenario(client, http):
        by_ids = await ask(http, input_ids=PROMPT, sampling_params=GREEDY)
        by_text = await ask(http, text="5281=", sampling_params=GREEDY)
        assert by_text["output_ids"] == by_ids["output_ids"]
        assert by_text["text"] == by_ids["text"] == "1258"

    play(scenario)


def test_output_log_probs(play, tolerance):
    async def scenario(client, http):
        body = await ask(http, input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)
        meta, output = body["meta_info"], body["output_ids"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == output
        assert all(len(entry) == 3 and entry[0] <= 0 for entry in meta["output_token_logprobs"])
        assert meta["input_token_logprobs"] == []
        scores = await client.score([*PROMPT, *output])
        served = [entry[0] for entry in meta["output_token_logprobs"]]
        assert served == pytest.approx(scores[len(PROMPT) - 1 :], abs=tolerance)

    play(scenario)


def test_temperature_enters_the_log_probs(play, tolerance):
    async def scenario(client, http):
        warm = {"max_new_tokens": 1, "temperature": 1.0, "top_k": 1}
        first = await ask(
            http, input_ids=PROMPT, sampling_params=warm, return_logprob=True, top_logprobs_num=99
        )
        cold = {"max_new_tokens": 1, "temperature": 0.5, "top_k": 2, "sampling_seed": 1}
        other = await ask(http, input_ids=PROMPT, sampling_params=cold, return_logprob=True)
        log_prob, token = other["meta_info"]["output_token_logprobs"][0][:2]
        import numpy as np

        entries = first["meta_info"]["output_top_logprobs"][0]
        sharp = {entry[1]: 2 * entry[0] for entry in entries}
        expected = sharp[token] - np.logaddexp.reduce(list(sharp.values()))
        assert log_prob == pytest.approx(expected, abs=10 * tolerance)

    play(scenario)


@pytest.mark.parametrize("start", [0, 2, 4])
def test_prompt_log_probs(play, start):
    async def scenario(client, http):
        body = await ask(
            http,
            input_ids=PROMPT,
            sampling_params={"max_new_tokens": 1, "temperature": 0},
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=2,
        )
        entries = body["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in entries] == PROMPT[start:]
        assert entries[0][0] is None and all(entry[0] <= 0 for entry in entries[1:])
        tops = body["meta_info"]["input_top_logprobs"]
        assert tops[0] is None and all(len(row) == 2 for row in tops[1:])
        assert len(body["meta_info"]["output_top_logprobs"]) == 1

    play(scenario)


def test_score_without_new_tokens(play):
    async def scenario(client, http):
        scores, version = await client.score_versioned(list(range(20, 84)))
        assert len(scores) == 63 and version
        body = await ask(http, input_ids=PROMPT, sampling_params={"max_new_tokens": 0})
        assert body["output_ids"] == [] and body["meta_info"]["finish_reason"]["type"] == "length"

    play(scenario)


def test_a_score_beside_others_is_the_score(play, tolerance):
    """SGLang gives it a log-prob of a token that nobody asked for, when both share a prefill."""

    async def scenario(client, http):
        alone = await client.score(PROMPT)
        await client.pause("abort")
        others = [asyncio.create_task(client.generate(GenerateRequest(PROMPT, LONG))) for _ in "ab"]
        score = asyncio.create_task(client.score(PROMPT))
        while client.in_flight < 3:
            await asyncio.sleep(0)
        await client.resume()
        assert await settled(score) == pytest.approx(alone, abs=tolerance)
        assert [len((await settled(other)).tokens) for other in others] == [240, 240]

    play(scenario)


def test_batches_answer_in_order(play):
    async def scenario(client, http):
        prompts = [[20 + i, 34] for i in range(6)]
        bodies = await ask(http, input_ids=prompts, sampling_params=GREEDY, rid="many")
        assert [body["meta_info"]["id"] for body in bodies] == [f"many_{i}" for i in range(6)]
        for prompt, body in zip(prompts, bodies, strict=True):
            alone = await ask(http, input_ids=prompt, sampling_params=GREEDY)
            assert alone["output_ids"] == body["output_ids"]

    play(scenario)


def test_parameters_per_prompt(play):
    async def scenario(client, http):
        bodies = await ask(
            http,
            input_ids=[PROMPT, PROMPT],
            sampling_params=[{**GREEDY, "max_new_tokens": n, "ignore_eos": True} for n in (2, 5)],
            rid=["first", "second"],
        )
        assert [len(body["output_ids"]) for body in bodies] == [2, 5]
        assert [body["meta_info"]["id"] for body in bodies] == ["first", "second"]

    play(scenario)


def test_several_samples_of_a_prompt(play):
    async def scenario(client, http):
        sampling = {"max_new_tokens": 12, "n": 6, "ignore_eos": True, "temperature": 1.5}
        bodies = await ask(http, input_ids=PROMPT, sampling_params=sampling)
        assert len(bodies) == 6
        assert len({body["meta_info"]["id"] for body in bodies}) == 6

    play(scenario)


def test_several_samples_differ(play, embedded_only):
    """SGLang's deterministic mode gives all of them one seed, so there they are equal."""

    async def scenario(client, http):
        sampling = {"max_new_tokens": 12, "n": 6, "ignore_eos": True, "temperature": 1.5}
        bodies = await ask(http, input_ids=PROMPT, sampling_params=sampling)
        assert len({tuple(body["output_ids"]) for body in bodies}) > 1

    play(scenario)


def test_length_and_stops(play):
    async def scenario(client, http):
        async def finish(**sampling):
            body = await ask(http, input_ids=PROMPT, sampling_params=GREEDY | sampling)
            return body["meta_info"]["finish_reason"], body["output_ids"], body["text"]

        assert await finish() == ({"type": "stop", "matched": 2}, [22, 23, 26, 29, 2], "1258")
        assert await finish(max_new_tokens=3) == (
            {"type": "length", "length": 3},
            [22, 23, 26],
            "125",
        )
        assert await finish(stop_token_ids=[26]) == (
            *({"type": "stop", "matched": 26}, [22, 23, 26], "12"),
        )
        assert await finish(stop=["25"]) == ({"type": "stop", "matched": "25"}, [22, 23, 26], "1")
        assert (await finish(stop="25", no_stop_trim=True))[2] == "125"
        reason, output, _ = await finish(ignore_eos=True, max_new_tokens=9)
        assert reason == {"type": "length", "length": 9} and len(output) == 9
        _, _, shown = await finish(skip_special_tokens=False, no_stop_trim=True)
        assert shown == "1258<eos>"
        _, output, _ = await finish(min_new_tokens=7)
        assert len(output) >= 7 and 2 not in output[:7]

    play(scenario)


def test_seeds(play, embedded_only):
    """SGLang honours sampling_seed in deterministic mode only; here it always counts."""

    async def scenario(client, http):
        async def sample(**more):
            sampling = {"max_new_tokens": 30, "temperature": 1.5, "ignore_eos": True, **more}
            return (await ask(http, input_ids=PROMPT, sampling_params=sampling))["output_ids"]

        assert await sample(sampling_seed=1) == await sample(sampling_seed=1)
        assert await sample(sampling_seed=1) != await sample(sampling_seed=2)
        assert await sample() != await sample()

    play(scenario)


def test_streams_are_cumulative(play):
    async def scenario(client, http):
        events = []
        request = {"input_ids": PROMPT, "sampling_params": GREEDY, "stream": True}
        async with http.stream("POST", "/generate", json=request | {"return_logprob": True}) as got:
            assert got.headers["content-type"].startswith("text/event-stream")
            async for line in got.aiter_lines():
                if line:
                    assert line.startswith("data: ")
                    events.append(line[6:])
        assert events.pop() == "[DONE]"
        bodies = [json.loads(event) for event in events]
        for before, after in itertools.pairwise(bodies):
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            assert after["text"].startswith(before["text"])
            assert before["meta_info"]["finish_reason"] is None
        last = bodies[-1]
        assert last["output_ids"] == [22, 23, 26, 29, 2] and last["text"] == "1258"
        assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
        assert len(last["meta_info"]["output_token_logprobs"]) == 5

    play(scenario)


def test_a_batch_can_stream(play):
    async def scenario(client, http):
        seen = {}
        request = {"input_ids": [PROMPT, [20, 34]], "sampling_params": GREEDY, "stream": True}
        async with http.stream("POST", "/generate", json=request) as got:
            async for line in got.aiter_lines():
                if line and line != "data: [DONE]":
                    body = json.loads(line[6:])
                    seen[body["index"]] = body
        assert set(seen) == {0, 1}
        assert all(body["meta_info"]["finish_reason"] for body in seen.values())

    play(scenario)


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": []},
        {"input_ids": [1] * 3000},
        {"input_ids": [1, 2], "sampling_params": {"temperature": -1}},
        {"input_ids": [1, 2], "sampling_params": {"top_p": 2}},
        {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": -5}},
        {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 10**9}},
        {},
    ],
)
def test_requests_that_cannot_be_served_get_a_sentence(play, body):
    async def scenario(client, http):
        answer = await http.post("/generate", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
        assert (await client.generate(GenerateRequest(PROMPT, GREEDY))).text == "1258"

    play(scenario)


@pytest.mark.parametrize("input_ids", [[[]], [10**6]], ids=["empty", "unknown token"])
def test_prompts_that_would_end_sglang_are_refused(play, embedded_only, input_ids):
    """SGLang 0.5.17 on CUDA takes both, and its scheduler ends."""

    async def scenario(client, http):
        answer = await http.post("/generate", json={"input_ids": input_ids})
        assert answer.status_code == 400 and answer.json()["error"]["message"]

    play(scenario)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"input_ids": [1'])
def test_malformed_json(play, raw):
    async def scenario(client, http):
        answer = await http.post("/generate", content=raw)
        assert 400 <= answer.status_code < 500

    play(scenario)


def test_unknown_fields_of_a_router_are_accepted(play):
    async def scenario(client, http):
        body = await ask(
            http,
            input_ids=PROMPT,
            sampling_params=GREEDY | {"frequency_penalty": 0.0, "regex": None},
            model=None,
            return_text_in_logprobs=False,
            session_params=None,
            priority=None,
            lora_path=None,
        )
        assert body["text"] == "1258"

    play(scenario)


def test_three_hundred_at_once(play):
    async def scenario(client, http):
        prompts = [[20 + i % 10, 20 + i // 10 % 10, 34] for i in range(300)]
        sampling = {"max_new_tokens": 20, "temperature": 0}
        together = await asyncio.gather(
            *(client.generate(GenerateRequest(prompt, sampling)) for prompt in prompts)
        )
        for prompt, result in list(zip(prompts, together, strict=True))[::60]:
            alone = await client.generate(GenerateRequest(prompt, sampling))
            assert alone.tokens == result.tokens
        assert len({result.rid for result in together}) == 300

    play(scenario)


def test_short_requests_are_not_held_up_by_long_ones(play):
    async def scenario(client, http):
        async with slowed(http):
            long = [await in_flight(client, f"long-{i}", sampling_seed=i) for i in range(3)]
            short = await client.generate(GenerateRequest(PROMPT, {"max_new_tokens": 2}))
            assert len(short.tokens) <= 2
            assert not any(request.ended for request in long)
        for request in long:
            assert len((await request.result()).tokens) == 240

    play(scenario)


def test_a_client_that_hangs_up_frees_its_place(play):
    async def scenario(client, http):
        async with slowed(http):
            streaming = await in_flight(client, "streaming")
            whole = asyncio.create_task(client.generate(GenerateRequest(PROMPT, LONG)))
            while await requests_held(http) < 2:
                await asyncio.sleep(0)
            await streaming.hang_up()
            whole.cancel()
            begun = time.monotonic()
            await until_idle(client, http)
            assert time.monotonic() - begun < 20  # SGLang looks for lost clients every 4 s
        assert (await client.generate(GenerateRequest(PROMPT, GREEDY))).text == "1258"

    play(scenario)


def test_an_id_in_use_is_refused(play, embedded_only):
    async def scenario(client, http):
        async with slowed(http):
            request = await in_flight(client, "twice")
            answer = await post(http, input_ids=PROMPT, rid="twice")
        assert (
            answer.status_code == 400 and "'twice' is in use" in answer.json()["error"]["message"]
        )
        await client.abort("twice")
        assert (await request.result()).finish_type == "abort"

    play(scenario)
