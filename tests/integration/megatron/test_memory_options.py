"""Options that trade time for memory change no number, and do what they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jobs
import models
import pytest

BASE: dict[str, Any] = {
    "lr": 1e-3,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 64,
}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
# Option -> attention passes and feed-forward passes of a training step, per layer and micro-batch.
RECOMPUTED: dict[str, tuple[dict[str, Any], float, float]] = {
    "nothing": ({}, 1, 1),
    "uniform": (FULL | {"recompute_method": "uniform"}, 2, 2),
    "block of one": (FULL | {"recompute_method": "block"}, 4 / 3, 4 / 3),
    "attention": ({"recompute_granularity": "selective"}, 2, 1),
    "feed-forward": ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, 1, 2),
}
# Part of the bytes kept for the backward pass that may be left.
KEPT = {"uniform": 0.15, "block of one": 0.75, "attention": 0.95, "feed-forward": 0.8}


@pytest.mark.parametrize("name", sorted(RECOMPUTED))
def test_recomputation_runs_what_was_asked_for_again_and_changes_no_bit(
    name: str, model: str, in_trainer: Callable[..., Any]
) -> None:
    """Three layers."""
    options, attention, feed_forward = RECOMPUTED[name]
    settings = BASE | {"hf_checkpoint": model}
    batch = models.random_batch(models.VOCAB)
    plain = in_trainer(jobs.counted_passes, settings, batch)
    again = in_trainer(jobs.counted_passes, settings | {"megatron": options}, batch)
    assert again["step"] == plain["step"]
    assert plain["attention"] == plain["feed_forward"] == 3 * plain["step"]["micro_batches"]
    assert again["attention"] == pytest.approx(attention * plain["attention"])
    assert again["feed_forward"] == pytest.approx(feed_forward * plain["feed_forward"])
    if name != "nothing":
        assert again["kept_bytes"] < KEPT[name] * plain["kept_bytes"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_steps_are_not_lost_to_rounding(
    dtype: str, model: str, in_trainer: Callable[..., Any]
) -> None:
    """bf16 weights have float32 masters: 20 steps, each far below bf16's rounding, add up."""
    settings = BASE | {"hf_checkpoint": model, "dtype": dtype, "lr": 1e-5, "weight_decay": 0.0}
    found = in_trainer(jobs.moved_masters, settings, models.random_batch(models.VOCAB), 20)
    assert found["dtype"] == "torch.float32"
    assert 1.9e-4 < found["largest"] < 2.2e-4, "20 steps of lr each"
