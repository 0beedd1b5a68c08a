"""Pausing, aborting, flushing, and what an engine says of itself."""

from __future__ import annotations

import asyncio
import re

import pytest

from slime_core.engines.protocol import GenerateRequest
from slime_core.waits import apoll
from slime_core.weights.sync.machine import drain
from tests.contracts.engines.conftest import (
    LONG,
    PROMPT,
    in_flight,
    requests_held,
    run_scenario,
    settled,
    slowed,
    until_idle,
)

GREEDY = {"max_new_tokens": 8, "temperature": 0}
ONE_TOKEN = GenerateRequest(PROMPT, {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True})


def test_health_and_description(play, model_path):
    async def scenario(client, http):
        for path in ("/health", "/health_generate"):
            answer = await http.get(path)
            assert (answer.status_code, answer.content) == (200, b"")
        info = await client.model_info()
        assert (await http.get("/get_model_info")).json() == info
        assert info["is_generation"] is True and info["weight_version"]
        assert info["model_path"]
        assert await client.weight_version() == info["weight_version"]
        server = await client.server_info()
        assert server["model_path"] == info["model_path"]
        assert "internal_states" in (await http.get("/get_server_info")).json()
        models = (await http.get("/v1/models")).json()
        assert models["object"] == "list" and models["data"][0]["max_model_len"] == 256
        assert await client.health() is True

    play(scenario)


@pytest.mark.parametrize("path", ["/get_weight_version", "/weight_version", "/nothing"])
def test_paths_that_do_not_exist(play, path):
    async def scenario(client, http):
        assert (await http.get(path)).status_code == 404

    play(scenario)


def test_wrong_method(play):
    async def scenario(client, http):
        assert (await http.get("/generate")).status_code == 405

    play(scenario)


def test_load_rises_and_falls(play):
    async def scenario(client, http):
        async with slowed(http):
            request = await in_flight(client, "load")
            load = (await http.get("/get_load")).json()[0]
            assert load["num_reqs"] == 1 and load["num_waiting_reqs"] == 0
            loads = (await http.get("/v1/loads", params={"include": "core"})).json()["loads"]
            assert loads[0]["num_running_reqs"] == 1
            await client.abort("load")
            await request.result()
            await until_idle(client, http)

    play(scenario)


def test_metrics(play):
    async def scenario(client, http):
        def value(page: str, name: str) -> float:
            series = re.findall(rf"^sglang:{name}{{.*}} (\S+)$", page, re.M)
            assert series, name
            return sum(map(float, series))

        before = (await http.get("/metrics")).text
        result = await client.generate(GenerateRequest(PROMPT, GREEDY))

        async def counted() -> str | None:
            page = (await http.get("/metrics")).text
            gained = value(page, "generation_tokens_total")
            gained -= value(before, "generation_tokens_total")
            return page if gained == len(result.tokens) else None

        page = await apoll("the tokens to be counted", 10, counted, interval_s=0.05)
        for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput"):
            assert value(page, name) >= 0
        assert value(page, "prompt_tokens_total") - value(before, "prompt_tokens_total") == 5
        for name in ("e2e_request_latency", "time_to_first_token"):
            count = f"{name}_seconds_count"
            assert value(page, count) == value(before, count) + 1
        # A fast server answers five tokens in one piece, with nothing between its tokens.
        count = "inter_token_latency_seconds_count"
        assert value(page, count) >= value(before, count)

    play(scenario)


# -- abort


def test_abort_answers_what_there_is(play):
    async def scenario(client, http):
        async with slowed(http):
            request = await in_flight(client, "abort-me")
            answer = await http.post("/abort_request", json={"rid": "abort-me"})
            assert (answer.status_code, answer.content) == (200, b"")
            result = await request.result()
            assert result.meta["finish_reason"] == {
                "type": "abort",
                "message": "Aborted",
                "status_code": None,
                "err_type": None,
            }
            assert 0 < len(result.tokens) < 240
            assert len(result.log_probs) == len(result.tokens)

    play(scenario)


def test_abort_spares_the_others(play):
    async def scenario(client, http):
        async with slowed(http):
            one, other = await in_flight(client, "one"), await in_flight(client, "other")
            for rid in ("no-such-request", "", "one"):
                await client.abort(rid)
            assert (await one.result()).finish_type == "abort"
        assert (await other.result()).finish_type == "length"

    play(scenario)


def test_abort_goes_by_prefix(play):
    """SGLang's trap: ids that begin with an aborted id are aborted too."""

    async def scenario(client, http):
        async with slowed(http):
            requests = [await in_flight(client, rid) for rid in ("job-1", "job-10", "job-2")]
            await client.abort("job-1")
        kinds = [(await request.result()).finish_type for request in requests]
        assert kinds == ["abort", "abort", "length"]

    play(scenario)


def test_abort_in_the_middle_of_a_batch(play):
    async def scenario(client, http):
        requests = [GenerateRequest(PROMPT, LONG, f"batch-{i:02d}") for i in range(20)]
        async with slowed(http):
            batch = asyncio.create_task(client.generate_batch(requests))
            while await requests_held(http) < 20:
                await asyncio.sleep(0)
            await asyncio.gather(*(client.abort(f"batch-{i:02d}") for i in (3, 5, 7, 7)))

            async def three_left() -> bool | None:
                return True if await requests_held(http) == 17 else None

            # SGLang answers an abort before the scheduler has seen it.
            await apoll("the aborted requests to leave", 20, three_left, interval_s=0.01)
            await client.abort_all()
            results = await settled(batch)
        assert [result.rid for result in results] == [request.rid for request in requests]
        for result in results:
            assert result.finish_type == "abort" and len(result.tokens) == len(result.log_probs)

    play(scenario)


# -- pause


def test_pause_by_abort_answers_at_once_and_holds_new_requests(play):
    async def scenario(client, http):
        old = await client.weight_version()
        async with slowed(http):
            running = [await in_flight(client, f"p{i}", sampling_seed=i) for i in range(4)]
            answer = await http.post("/pause_generation", json={})
        assert answer.json() == {"message": "Generation paused successfully.", "status": "ok"}
        for request in running:
            result = await request.result()
            assert result.finish_type == "abort" and result.weight_version == old
        held = asyncio.create_task(client.generate(GenerateRequest(PROMPT, GREEDY, "held")))
        await client.abort("held")
        await drain("the engine", client)
        assert not held.done()
        answer = await http.post("/continue_generation", json={"torch_empty_cache": True})
        assert answer.json() == {"message": "Generation continued successfully.", "status": "ok"}
        assert (await settled(held)).text == "1258"

    play(scenario)


def test_a_paused_engine_is_healthy(play, embedded_only):
    """SGLang's /health generates a token, so there it fails under a pause, after 20 seconds."""

    async def scenario(client, http):
        await client.pause("abort")
        assert await client.health() is True
        await client.resume()

    play(scenario)


def test_pausing_twice_and_continuing_twice_is_harmless(play):
    async def scenario(client, http):
        for _ in range(2):
            await client.pause("abort")
        for _ in range(2):
            await client.resume()
        assert (await client.generate(GenerateRequest(PROMPT, GREEDY))).text == "1258"

    play(scenario)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_held_requests_go_on_to_their_end(play, mode):
    async def scenario(client, http):
        # Greedy: SGLang takes no seed outside its deterministic mode.
        whole = await (await in_flight(client, f"whole-{mode}", temperature=0)).result()
        async with slowed(http):
            request = await in_flight(client, f"held-{mode}", temperature=0)
            await client.pause(mode)
        assert await client.flush_cache() is False
        await client.set_weight_version("later")
        assert not request.ended
        await client.resume()
        result = await request.result()
        assert result.tokens == whole.tokens and len(result.tokens) == 240
        assert result.weight_version == "later"
        assert result.meta["num_retractions"] == (mode == "retract")
        await client.set_weight_version("default")

    play(scenario)


def test_a_pause_with_a_queue(own_engine):
    """More requests than may run: those in the queue are answered too."""

    async def scenario(client, http):
        requests = [GenerateRequest([20 + i, 34], LONG, f"q-{i}") for i in range(9)]
        async with slowed(http):
            first = await in_flight(client, "first")
            batch = asyncio.create_task(client.generate_batch(requests))
            while await requests_held(http) < 10:
                await asyncio.sleep(0)
            await client.pause("abort")
        results = await settled(batch)
        messages = [result.meta["finish_reason"]["message"] for result in results]
        assert messages == ["Aborted"] + ["Abort in waiting queue"] * 8
        assert (await first.result()).finish_type == "abort"
        await client.resume()
        assert (await client.generate(GenerateRequest(PROMPT, GREEDY))).text == "1258"

    run_scenario(own_engine(max_running_requests=2).url, scenario)


def test_pause_modes_are_checked(play):
    async def scenario(client, http):
        answer = await http.post("/pause_generation", json={"mode": "sometimes"})
        assert 400 <= answer.status_code < 500
        assert (await client.generate(GenerateRequest(PROMPT, GREEDY))).text == "1258"

    play(scenario)


def test_a_call_cancelled_at_the_gate_leaves_nothing(play):
    async def scenario(client, http):
        await client.pause("abort")
        held = asyncio.create_task(client.generate(GenerateRequest(PROMPT, GREEDY, "gate")))
        while not client.in_flight:
            await asyncio.sleep(0)
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await client.resume()
        await until_idle(client, http)
        assert (await client.generate(GenerateRequest(PROMPT, GREEDY))).text == "1258"

    play(scenario)


def test_an_answer_leaves_before_the_engine_is_idle(play):
    """SGLang's trap: its scheduler lets go of a batch one step after the answers have left.

    A flush in between is refused. An update that asks for one ends the engine, see test_weights.
    """

    async def scenario(client, http):
        async with slowed(http, step_s=1.0):
            assert (await client.generate(ONE_TOKEN)).finish_type == "length"
            assert await client.flush_cache() is False
        await drain("the engine", client)
        assert await client.flush_cache() is True

    play(scenario)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_when_idle(play, method):
    async def scenario(client, http):
        answer = await http.request(method, "/flush_cache", params={"timeout": 20})
        assert answer.status_code == 200 and answer.text.startswith("Cache flushed.")

    play(scenario)


def test_flush_with_a_timeout_waits_for_the_end(play):
    async def scenario(client, http):
        async with slowed(http):
            request = await in_flight(client, "flush", max_new_tokens=60)
        answer = await http.post("/flush_cache", params={"timeout": 30})
        assert answer.status_code == 200
        assert (await request.result()).finish_type == "length"

    play(scenario)


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/resume_memory_occupation"])
def test_memory_calls_do_nothing(play, path):
    async def scenario(client, http):
        answer = await http.post(path, json={"tags": ["weights", "kv_cache"]})
        assert (answer.status_code, answer.json()) == (200, None)

    play(scenario)
