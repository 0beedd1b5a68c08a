"""A function that converts the samples of a batch: the trainer trains what it gave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import models
import pytest

from slime_core.batching.types import TrainBatch
from slime_core.refs import Ref
from slime_core.run.context import RunContext
from slime_core.stages.pack import pack
from slime_core.store.batch import read_batch
from slime_core.store.load import load_train_batch
from tests.unit.stages.test_pack import lab, packed
from tests.unit.store.builders import group_rows

SETTINGS: dict[str, Any] = {
    "lr": 1e-3, "weight_decay": 0.0, "train_iters": 10, "rollout_temperature": 1.0,
    "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "collective_timeout_s": 60.0,
}  # fmt: skip
FUNCTION = """
REWARDS = [1.0, -2.0, 0.5, 3.0, 0.25, -1.0, 2.0, 1.5]

def convert(args, samples):
    samples = [s for s in samples if s.index != 3]
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [REWARDS[s.index] for s in samples],
        "loss_masks": [[0] * len(s.loss_mask) if s.index == 6 else s.loss_mask for s in samples],
        "sample_indices": [s.index for s in samples],
    }
"""


def loaded(ctx: RunContext) -> TrainBatch:
    batch = read_batch(ctx.backend, 0)
    assert batch is not None
    return load_train_batch(ctx.backend, batch)


def test_it_is_trained_and_trained_again_without_the_function(
    tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    model = models.save_random_model(tmp_path / "m", "qwen3", True)
    own = tmp_path / "own.py"
    own.write_text(FUNCTION)
    path = {"custom_convert_samples_to_train_data_path": f"{own}:convert"}
    ctx = lab(tmp_path, **path)
    packed(ctx, [group_rows(0), group_rows(1)])

    def steps(batch: TrainBatch) -> list[dict[str, Any]]:
        chosen = SETTINGS | {"hf_checkpoint": model}
        return in_trainer(jobs.train, chosen, [batch])["results"][0]["steps"]

    (first,) = steps(loaded(ctx))
    # Before the first step the ratio is 1, so the loss is minus the mean reward of eight rollouts,
    # of which the one that was left out (3) and the one without trained tokens (6) give 0.
    assert first["loss"] == pytest.approx(-(1.0 - 2.0 + 0.5 + 0.25 - 1.0 + 1.5) / 8, abs=1e-6)

    own.write_text(FUNCTION.replace("1.0, -2.0", "9.0, 9.0"))
    assert asyncio.run(pack(ctx, Ref("", "scores", 0))).from_store
    own.unlink()
    (again,) = steps(loaded(ctx))
    assert (again["weights_digest"], again["loss"]) == (first["weights_digest"], first["loss"])
