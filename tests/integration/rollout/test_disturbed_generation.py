"""Generation goes on through weight syncs and deaths of engines, and says what came from where."""

import asyncio
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from slime_core.engines.client import EngineClient
from slime_core.errors import DeadlineError
from slime_core.rollout.gate import EngineGate
from slime_core.rollout.generate import Sampling, generate
from slime_core.sample import Sample, Span, Status
from slime_core.seeds import derive_seed
from slime_core.weights.sync.machine import drain
from tests.integration.rollout.conftest import MODEL, START_S, in_mid_generation

LIMIT = 200  # tokens
SAMPLING = Sampling(LIMIT, {"temperature": 1.0, "ignore_eos": True}, timeout_s=60.0)
TOLERANCE = 1e-4


def group() -> list[Sample]:
    return [Sample(group_index=5, index=40 + i, tokens=[26, 23, 29, 22, 34]) for i in range(4)]


def seed_of(sample: Sample) -> int:
    return derive_seed("test", sample.index or 0, sample.response_length)


async def gate_of(*urls: str) -> EngineGate:
    gate = EngineGate(EngineClient, 64)
    await gate.set_engines(list(urls))
    await gate.open()
    return gate


async def undisturbed(url: str) -> list[Sample]:
    gate, samples = await gate_of(url), group()
    await generate(samples, gate, SAMPLING, seed_of)
    await gate.aclose()
    return samples


@pytest.fixture
def other_weights(tmp_path: Path) -> str:
    """A folder with the model's weights, changed a little."""
    folder = tmp_path / "other"
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: tensor * 1.05 for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.slow
def test_a_sample_goes_on_under_new_weights_and_keeps_both_parts(engine, other_weights):
    process = engine()

    async def scenario() -> None:
        process.wait_healthy(START_S)
        before = await undisturbed(process.url)
        gate, samples = await gate_of(process.url), group()
        task = asyncio.create_task(generate(samples, gate, SAMPLING, seed_of))
        async with EngineClient(process.url) as control:
            await in_mid_generation(control)
            await gate.close()
            await control.pause("abort")
            await drain("the engine", control)
            await control.update_weights_from_disk(other_weights, "l0-2")
            await control.resume()
            assert not task.done(), "the rest waits for the gate"
            await gate.open()
            await asyncio.wait_for(task, 60.0)
            for old, sample in zip(before, samples, strict=True):
                first, second = sample.spans
                assert first == Span(0, first.length, "l0-1") and first.length > 0
                assert second == Span(first.length, LIMIT - first.length, "l0-2")
                assert sample.response_length == LIMIT and sample.status is Status.TRUNCATED
                assert sample.weight_versions == ["l0-1", "l0-2"]
                kept = 5 + first.length
                assert sample.tokens[:kept] == old.tokens[:kept], "the prefix stays as sampled"
                assert (
                    sample.rollout_log_probs[: first.length]
                    == (old.rollout_log_probs[: first.length])
                )
                scored = (await control.score(sample.tokens))[kept - 1 :]
                new = sample.rollout_log_probs[first.length :]
                assert max(abs(a - b) for a, b in zip(scored, new, strict=True)) < TOLERANCE
        await gate.aclose()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_request_of_a_killed_engine_gives_the_same_tokens_elsewhere(engine):
    """On the engine that is left, and on one that is started in its place."""
    first, second = engine(), engine()

    async def scenario() -> None:
        first.wait_healthy(START_S)
        want = await undisturbed(first.url)
        gate, samples = await gate_of(first.url), group()
        task = asyncio.create_task(generate(samples, gate, SAMPLING, seed_of))
        async with EngineClient(first.url) as control:
            await in_mid_generation(control)
        os.kill(first.pid or 0, signal.SIGKILL)
        second.wait_healthy(START_S)
        await gate.set_engines([first.url, second.url])  # the dead one is listed, too
        await asyncio.wait_for(task, 60.0)
        assert list(gate.down) in ([], [first.url])
        assert [s.tokens for s in samples] == [s.tokens for s in want]
        assert [s.rollout_log_probs for s in samples] == [s.rollout_log_probs for s in want]
        assert all(s.spans == [Span(0, LIMIT, "l0-1")] for s in samples)
        await gate.aclose()

    asyncio.run(scenario())


def test_a_frozen_engine_is_found_at_the_deadline_and_marked():
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections, never answers
            url = f"http://127.0.0.1:{mute.getsockname()[1]}"
            gate = await gate_of(url)
            short = Sampling(LIMIT, SAMPLING.params, timeout_s=0.3)
            with pytest.raises(DeadlineError, match="generation of group 5"):
                await generate(group(), gate, short, seed_of)
            assert list(gate.down) == [url]
            await gate.aclose()

    asyncio.run(scenario())
