"""A checkpoint moves through layouts without losing a bit of weights or optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import models
import numpy as np
import pytest

BASE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "adam_eps": 1e-2,
    "train_iters": 20,
    "lr_decay_style": "cosine",
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 64,
    "collective_timeout_s": 60.0,
}
# Of the next step's loss in another layout. Weights and optimizer state are equal to the bit; in
# bf16 the partial sums of tensor-parallel ranks are rounded before they are added.
NEXT_LOSS = {"float32": 1e-5, "bfloat16": 1e-2}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_parallel_to_one_rank_to_a_pipeline(
    dtype: str,
    tied: bool,
    tmp_path: Path,
    in_trainer: Callable[..., Any],
    in_ranks: Callable[..., list[Any]],
) -> None:
    model = models.save_random_model(tmp_path / "m", "qwen3", tied, num_hidden_layers=4)
    settings = BASE | {"hf_checkpoint": model, "dtype": dtype}
    tensor = settings | {"tensor_model_parallel_size": 2}
    pipeline = settings | {"pipeline_model_parallel_size": 2}
    seen = [models.random_batch(models.VOCAB, rows=21, seed=seed) for seed in range(3)]
    first, alone, last, again = (str(tmp_path / name) for name in ("tp2", "one", "pp2", "tp2b"))

    in_ranks(jobs.train_on_rank, tensor, seen[:2], None, (1, first))
    steps = [
        in_ranks(jobs.train_on_rank, tensor, seen[2:], first)[0]["results"][0]["steps"][0],
        in_trainer(jobs.reshard, settings, first, alone, seen[2]),
        in_ranks(jobs.reshard_on_rank, pipeline, alone, last, seen[2])[0],
        in_ranks(jobs.reshard_on_rank, tensor, last, again, seen[2])[0],
    ]
    wanted = in_trainer(jobs.stored_tensors, settings, first)
    assert any("exp_avg_sq" in name for name in wanted)
    assert all(np.abs(wanted[name]).max() > 0 for name in wanted if "exp_avg" in name)
    for folder in (alone, last, again):
        found = in_trainer(jobs.stored_tensors, settings, folder)
        assert found.keys() == wanted.keys()
        for name, tensor_then in wanted.items():
            assert np.array_equal(found[name], tensor_then), (folder, name)
    for step in steps[1:]:
        assert step["loss"] == pytest.approx(steps[0]["loss"], rel=NEXT_LOSS[dtype], abs=3e-6)
        assert step["lr"] == steps[0]["lr"]
    assert steps[3]["weights_digest"] == steps[0]["weights_digest"], "back where it came from"
