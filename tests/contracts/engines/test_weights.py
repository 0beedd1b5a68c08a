"""Weight updates over HTTP, with SGLang's traps."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from safetensors.torch import load_file, save_file

from slime_core.engines.client import EngineAnswerError, EngineUnreachableError
from slime_core.engines.protocol import GenerateRequest, UpdateResult
from slime_core.waits import poll
from slime_core.weights.sync.machine import drain
from tests.contracts.engines.conftest import (
    LONG,
    MODEL_PATH,
    PROMPT,
    in_flight,
    requests_held,
    run_scenario,
    settled,
    slowed,
    until_idle,
)

GREEDY = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def other_weights():
    """Weights that answer differently: the last layer's MLP is turned around."""
    state = load_file(str(MODEL_PATH / "model.safetensors"))
    return {name: -value if "layers.1.mlp" in name else value for name, value in state.items()}


@pytest.fixture(scope="module")
def other_folder(other_weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    save_file(other_weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((MODEL_PATH / "config.json").read_text())
    return folder


async def tokens(client) -> list[int]:
    return (await client.generate(GenerateRequest(PROMPT, GREEDY))).tokens


async def load(client, folder, version: str) -> UpdateResult:
    """An update that flushes: only an engine that says itself that it is idle outlives one."""
    await drain("the engine", client)
    return await client.update_weights_from_disk(str(folder), version)


async def restore(client) -> None:
    await load(client, MODEL_PATH, "default")


def test_from_disk(play, other_folder):
    async def scenario(client, http):
        before = await tokens(client)
        answer = await load(client, other_folder, "v1")
        assert answer.success and "v1" in answer.message
        result = await client.generate(GenerateRequest(PROMPT, GREEDY))
        assert result.tokens != before and result.weight_version == "v1"
        assert await client.weight_version() == "v1"
        await restore(client)
        assert await tokens(client) == before

    play(scenario)


@pytest.mark.parametrize("form", [None, "flattened_bucket"])
def test_from_tensors(play, other_weights, other_folder, form):
    from slime_core.engines.tensor_wire import serialize_bucket, serialize_tensors

    async def scenario(client, http):
        await load(client, other_folder, "disk")
        expected = await client.score(PROMPT)
        await restore(client)
        write = serialize_bucket if form else serialize_tensors
        pairs = list(other_weights.items())
        await client.update_weights_from_tensor([write(pairs[:9])], load_format=form)
        assert await client.weight_version() == "default"
        await client.update_weights_from_tensor([write(pairs[9:])], "v2", load_format=form)
        assert await client.score(PROMPT) == expected
        assert await client.weight_version() == "v2"
        await restore(client)

    play(scenario)


def test_an_update_without_a_pause_waits_for_the_running(play, other_folder):
    """It goes ahead with the last answer, when the engine need not be idle: no flush then."""

    async def scenario(client, http):
        async with slowed(http):
            request = await in_flight(client, "old")
            update = asyncio.create_task(
                client.update_weights_from_disk(str(other_folder), "v3", flush_cache=False)
            )
            assert await requests_held(http) == 1 and not update.done()
        result = await request.result()
        assert len(result.tokens) == 240 and result.weight_version != "v3"
        assert (await settled(update)).success
        assert await client.weight_version() == "v3"
        await restore(client)

    play(scenario)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_update_under_a_held_request(play, other_folder, mode):
    async def scenario(client, http):
        whole = await (await in_flight(client, f"one-span-{mode}", temperature=0)).result()
        async with slowed(http):
            request = await in_flight(client, f"spans-{mode}", temperature=0)
            await client.pause(mode)
        noted = len(request.results[-1].tokens)
        await client.update_weights_from_disk(str(other_folder), "v4", flush_cache=False)
        await client.resume()
        result = await request.result()
        assert result.tokens[:noted] == whole.tokens[:noted]
        assert result.tokens != whole.tokens and len(result.tokens) == 240
        assert result.weight_version == "v4"
        await restore(client)

    play(scenario)


def test_the_whole_of_a_sync(play, other_folder):
    """Pause by abort, flush, update, score, resume, continue the prefix under the new weights."""

    async def scenario(client, http):
        async with slowed(http):
            request = await in_flight(client, "sync")
            await client.pause("abort")
        part = await request.result()
        assert part.finish_type == "abort" and part.weight_version == "default"
        await load(client, other_folder, "v5")
        await client.resume()
        rest = GenerateRequest([*PROMPT, *part.tokens], GREEDY)
        result = await client.generate(rest)
        assert result.weight_version == "v5" and len(result.tokens) == 5
        await restore(client)

    play(scenario)


def test_a_sync_right_after_an_answer(play, other_folder):
    async def scenario(client, http):
        async with slowed(http, step_s=0.3):
            for version in ("v6", "v7", "default"):
                await client.generate(GenerateRequest(PROMPT, {**GREEDY, "max_new_tokens": 1}))
                await client.pause("abort")
                folder = MODEL_PATH if version == "default" else other_folder
                await load(client, folder, version)
                await client.resume()
                assert await client.weight_version() == version

    play(scenario)


def test_a_client_that_does_not_read_its_stream_holds_nothing_up(play, embedded_only):
    """The engine is done with a call when its tokens are made, not when they are read."""

    async def scenario(client, http):
        many = [PROMPT] * 30
        body = {"input_ids": many, "sampling_params": LONG, "stream": True, "return_logprob": True}
        async with http.stream("POST", "/generate", json=body) as unread:
            assert unread.status_code == 200
            await settled(client.pause("abort"))
            await drain("the engine", client)
            await client.resume()
        assert await tokens(client) == [22, 23, 26, 29, 2]

    play(scenario)


def test_a_refused_update_leaves_the_weights(play, tmp_path):
    async def scenario(client, http):
        before = await client.score(PROMPT)
        with pytest.raises(EngineAnswerError) as caught:
            await client.update_weights_from_disk(str(tmp_path), "v6")
        assert caught.value.status == 400 and caught.value.message
        assert await client.weight_version() == "default"
        assert await client.score(PROMPT) == before

    play(scenario)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"serialized_named_tensors": []},
        {"serialized_named_tensors": ["AAAA"]},
        {"serialized_named_tensors": ["gASVHgAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAJpZJSFlFKULg=="]},
    ],
)
def test_tensor_payloads_that_are_refused(play, embedded_only, body):
    """The last one is a pickle of os.system("id")."""

    async def scenario(client, http):
        answer = await http.post("/update_weights_from_tensor", json=body)
        assert answer.status_code == 400
        assert await client.health() is True

    play(scenario)


def test_renaming_aborts_unless_told_not_to(play):
    async def scenario(client, http):
        async with slowed(http):
            request = await in_flight(client, "renamed")
            await client.set_weight_version("same weights")
            assert not request.ended
            answer = await http.post("/update_weight_version", json={"new_version": "default"})
        assert answer.json()["success"] is True and answer.json()["new_version"] == "default"
        assert (await request.result()).finish_type == "abort"

    play(scenario)


@pytest.mark.parametrize(
    "path",
    [
        "/init_weights_update_group",
        "/update_weights_from_distributed",
        "/destroy_weights_update_group",
    ],
)
def test_broadcast_groups_are_a_later_piece(play, embedded_only, path):
    async def scenario(client, http):
        answer = await http.post(path, json={"group_name": "g"})
        assert answer.status_code == 400
        assert "update_weights_from_disk" in answer.json()["message"]

    play(scenario)


@pytest.mark.parametrize("mode", ["in_place", pytest.param("retract", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_flushing_an_update_under_held_requests_ends_the_engine(own_engine, other_folder, mode):
    """SGLang 0.5.17 dies of this, so clients must be tested against an engine that does."""
    engine = own_engine()

    async def scenario(client, http):
        async with slowed(http):
            request = await in_flight(client, "held")
            await client.pause(mode)
        with pytest.raises(EngineUnreachableError):
            await client.update_weights_from_disk(str(other_folder), "v7", flush_cache=True)
        await request.hang_up()

    run_scenario(engine.url, scenario)
    assert poll("the engine to end", 10, lambda: engine.returncode) != 0
    assert "Cache flush failed after updating weights" in engine.log_tail()


@pytest.mark.slow
def test_flushing_an_update_right_after_an_answer_ends_the_engine(own_engine, other_folder):
    """The answer has left, the scheduler still holds its batch; SGLang's case: sglang_cpu."""
    engine = own_engine()

    async def scenario(client, http):
        async with slowed(http, step_s=1.0):
            await client.generate(GenerateRequest(PROMPT, {**GREEDY, "max_new_tokens": 1}))
            with pytest.raises(EngineUnreachableError):
                await client.update_weights_from_disk(str(other_folder), "v8", flush_cache=True)

    with pytest.raises(httpx.TransportError):  # slowed cannot be taken back
        run_scenario(engine.url, scenario)
    assert "Cache flush failed after updating weights" in engine.log_tail()


@pytest.mark.slow
def test_a_stop_ends_the_engine_whatever_it_holds(own_engine):
    """With requests in flight and one held at the gate."""
    engine = own_engine()

    async def scenario(client, http):
        async with slowed(http):
            requests = [await in_flight(client, f"r{i}") for i in range(3)]
            await client.pause("in_place")
        held = asyncio.create_task(client.generate(GenerateRequest(PROMPT, GREEDY)))
        while not client.in_flight:
            await asyncio.sleep(0)
        status = await asyncio.to_thread(engine.terminate, 30)
        assert status == 0, "by itself"
        held.cancel()
        for request in requests:
            await request.hang_up()
        await asyncio.gather(held, return_exceptions=True)

    run_scenario(engine.url, scenario)


@pytest.mark.slow
def test_deterministic_engines_agree_to_the_bit(own_engine):
    """Two processes, one on more threads and busy with a crowd: the same request and bits."""
    engines = [
        own_engine(wait=False, threads=threads, enable_deterministic_inference=True)
        for threads in (1, 2)
    ]
    for engine in engines:
        engine.wait_healthy(240)
    quiet, busy = engines
    sampling = {"max_new_tokens": 100, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 77}
    request = GenerateRequest(PROMPT, sampling, logprob_start=0)
    results = []

    async def alone(client, http):
        results.append(await client.generate(request))

    async def crowded(client, http):
        crowd = [
            asyncio.create_task(
                client.generate(GenerateRequest([20 + i % 10] * (1 + i % 30), {"temperature": 0.8}))
            )
            for i in range(100)
        ]
        results.append(await client.generate(request))
        await asyncio.gather(*crowd)
        await until_idle(client, http)

    run_scenario(quiet.url, alone)
    run_scenario(busy.url, crowded)
    one, two = results
    assert one.tokens == two.tokens
    assert one.log_probs == two.log_probs
    assert one.prompt_log_probs == two.prompt_log_probs
