"""What only a GPU can show: the packed attention kernel and weights by CUDA IPC."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from slime_core.engines.client import EngineClient
from slime_core.engines.launcher import engine_process, free_port
from slime_core.engines.tensor_wire import FLATTENED_BUCKET, cut_buckets
from slime_core.waits import within

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU"),
]
MODEL = Path(__file__).parents[2] / "configs/quickstart/model"
TOKENS = [26, 23, 29, 22, 34, 5, 6, 7]
BF16_ERROR = 1e-2  # relative norm, against float32


@pytest.mark.parametrize("lengths", [[1, 7, 300, 64], [256] * 4, [33]])
def test_packed_attention_equals_attention_a_sequence(lengths):
    from benchmarks.gpu.attention import compare

    for errors in (way["errors"] for way in compare(lengths, seed=sum(lengths)).values()):
        assert max(errors) < BF16_ERROR


def test_weights_reach_an_engine_by_cuda_ipc(tmp_path):
    """Buckets small enough that there are several; two engines read the same memory."""
    from safetensors.torch import load_file

    weights = load_file(str(MODEL / "model.safetensors"))
    changed = {name: (tensor * 1.5).cuda() for name, tensor in weights.items()}
    buckets = list(cut_buckets(changed.items(), 200_000))
    assert len(buckets) > 2
    options = {"device": "cuda", "dtype": "float32"}
    engines = [
        engine_process("embedded", str(MODEL), free_port(), tmp_path / f"{i}.log", options)
        for i in range(2)
    ]

    async def scores(engine) -> tuple[list[float], list[float]]:
        async with EngineClient(engine.url) as client:
            before = await client.score(TOKENS)
            for bucket in buckets:
                await client.update_weights_from_tensor(
                    [bucket.wire()], "v1", load_format=FLATTENED_BUCKET
                )
            assert await client.weight_version() == "v1"
            return before, await client.score(TOKENS)

    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_healthy(120)
        before, after = asyncio.run(within("the updates", 60, scores(engines[0])))
        again = asyncio.run(within("the updates", 60, scores(engines[1])))
    finally:
        for engine in engines:
            engine.kill()
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.01
    assert again == (before, after)
