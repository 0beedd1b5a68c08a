"""Settings and batches of the tests of algorithms and roles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.batching.types import TrainBatch
from tests.integration.megatron import models

BASE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.0,
    "train_iters": 10,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 64,
    "collective_timeout_s": 60.0,
}
PLUS = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}
OPD = {"use_opd": True, "opd_teacher_load": "teacher"}  # the fixture knows the folder
PPO = {"advantage_estimator": "ppo", "critic_lr": 2e-3}


def near_policy(model: str, batch: TrainBatch) -> TrainBatch:
    """The batch with engine log-probs near the model's own."""
    own = models.load_model(model)
    with torch.no_grad():
        rows = [models.token_log_probs(own, batch, row) for row in range(batch.num_rows)]
    noise = np.random.default_rng(1).normal(0, 0.3, len(batch.loss_mask))
    engine = (torch.cat(rows).numpy() + noise).astype(np.float32)
    return replace(batch, rollout_log_probs=engine)


def settings(model: str, **algorithm: Any) -> dict[str, Any]:
    return BASE | {"hf_checkpoint": model, "algorithm": AlgorithmSettings(**algorithm)}


def steps_of(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for result in outcome["results"] for step in result["steps"]]


def sample_weights(batch: TrainBatch) -> list[float]:
    """The weight of each token of a row in the loss."""
    rollouts = len(set(batch.rollout_ids.tolist()))
    return [1 / max(d, 1) / rollouts for d in batch.denominators]
