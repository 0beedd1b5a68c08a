"""What the run will be: processes, steps, tokens, and a rough idea of memory."""

from __future__ import annotations

from typing import Any

from slime_core.check.model import parameters
from slime_core.cluster.device import Device
from slime_core.cluster.engine_choice import EngineKind
from slime_core.cluster.trainer_settings import training_dtype
from slime_core.config.tree import RunConfig
from slime_core.weights.tables import ModelShape

# Bytes a parameter of the trainer: weights, float32 gradients, Adam's two moments, and in bf16
# float32 master weights besides.
TRAINING_BYTES = {"float32": 4 + 4 + 8, "bfloat16": 2 + 4 + 8 + 4}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def plan(
    config: RunConfig, device: Device, kind: EngineKind, shape: ModelShape | None
) -> dict[str, Any]:
    """The plan by name. Memory leaves out activations and what libraries take for themselves."""
    rollout, cluster = config.rollout, config.cluster
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    found: dict[str, Any] = {
        "device": device,
        "trainer_ranks": cluster.actor_num_nodes * cluster.actor_num_gpus_per_node,
        "engines": cluster.rollout_num_gpus // cluster.rollout_num_gpus_per_engine,
        "engine": kind,
        "iterations": config.run.num_rollout,
        "samples_an_iteration": samples,
        "optimizer_steps": config.run.num_rollout * config.num_steps,
        "response_tokens_an_iteration_at_most": samples * rollout.rollout_max_response_len,
        "evaluations": _evaluations(config),
    }
    if shape is not None:
        found |= _memory(config, shape)
    return found


def _evaluations(config: RunConfig) -> int:
    interval = config.eval.eval_interval
    if interval is None:
        return 0
    return config.run.num_rollout // interval + (not config.eval.skip_eval_before_train)


def _memory(config: RunConfig, shape: ModelShape) -> dict[str, Any]:
    dtype = training_dtype(config, shape.dtype)
    size = parameters(shape)
    algorithm = config.algorithm
    frozen = bool(algorithm.use_kl_loss or algorithm.kl_coef > 0) + bool(algorithm.use_opd)
    frozen += algorithm.keep_old_actor
    trained = 1 + (algorithm.advantage_estimator == "ppo")
    kv_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES[dtype]
    return {
        "training_dtype": dtype,
        "parameters": size,
        "trainer_bytes": size * (trained * TRAINING_BYTES[dtype] + frozen * DTYPE_BYTES[dtype]),
        "engine_weight_bytes": size * DTYPE_BYTES[dtype],
        "kv_cache_bytes_a_token": kv_token,
    }
