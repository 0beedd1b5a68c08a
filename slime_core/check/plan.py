"""What the run will be: processes, steps, tokens, and a rough idea of memory."""

from __future__ import annotations

from typing import Any

from slime_core.check.memory import DTYPE_BYTES, share_on_host, trainer_memory
from slime_core.check.model import parameters
from slime_core.cluster.device import Device
from slime_core.cluster.engine_choice import EngineKind
from slime_core.cluster.trainer_settings import trainer_settings, training_dtype
from slime_core.config.parallel import layout_of, option_name
from slime_core.config.tree import RunConfig
from slime_core.evaluation.resolve import eval_schedule
from slime_core.megatron.arguments import resolve
from slime_core.megatron.declared import declared_fields
from slime_core.megatron.settings import LOGITS_AT_ONCE, TrainerSettings
from slime_core.weights.tables import ModelShape, expert_parameters

FLOAT32_BYTES = 4
# Adam's two moments, and in bf16 float32 master weights besides; data-parallel ranks share them.
OPTIMIZER_BYTES = {"float32": 8, "bfloat16": 8 + 4}
LOGITS_COPIES = 5
ENGINE_REQUESTS = 256
"""Requests that the embedded engine runs at once."""


def plan(
    config: RunConfig, device: Device, kind: EngineKind, shape: ModelShape | None
) -> dict[str, Any]:
    """The plan by name. Memory leaves out what libraries take for themselves; activations are in
    policy_peak_bytes_a_rank."""
    rollout, cluster = config.rollout, config.cluster
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    ranks = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    engines = cluster.rollout_num_gpus // cluster.rollout_num_gpus_per_engine
    steps, debug = config.run.num_rollout * config.num_steps, config.debug
    found: dict[str, Any] = {
        "device": device,
        "trainer_ranks": 0 if debug.debug_rollout_only else ranks,
        "engines": 0 if debug.debug_train_only else engines,
        "engine": kind,
        "iterations": config.run.num_rollout,
        "samples_an_iteration": samples,
        "optimizer_steps": 0 if debug.debug_rollout_only else steps,
        "response_tokens_an_iteration_at_most": samples * rollout.rollout_max_response_len,
        "evaluations": _evaluations(config),
    }
    if shape is not None:
        found |= _memory(config, device, kind, shape)
    return found


def _evaluations(config: RunConfig) -> int:
    return len(eval_schedule(config).due_versions())


def _memory(
    config: RunConfig, device: Device, kind: EngineKind, shape: ModelShape
) -> dict[str, Any]:
    dtype = training_dtype(config, shape.dtype)
    size = parameters(shape)
    settings = _resolved(config, device, shape)
    kv_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES[dtype]
    found = {
        "training_dtype": dtype,
        "parameters": size,
        **_trainer_memory(config, shape, size, share_on_host(settings)),
        "policy_peak_bytes_a_rank": _policy_peak(config, settings, shape),
        "engine_weight_bytes": size * DTYPE_BYTES[dtype],
        "kv_cache_bytes_a_token": kv_token,
    }
    if kind == "embedded":  # SGLang takes a share of the card, whatever is asked of it
        samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
        requests = min(ENGINE_REQUESTS, samples)
        found["kv_cache_bytes_at_most"] = requests * _longest(config, shape) * kv_token
    return found


def _trainer_memory(config: RunConfig, shape: ModelShape, size: int, away: float) -> dict[str, int]:
    """Of all ranks together, of one, and of the logits that a rank holds at once.

    Args:
        size: parameters.
        away: share of optimizer states that hosts of GPUs keep.
    """
    dtype, algorithm = training_dtype(config, shape.dtype), config.algorithm
    frozen = bool(algorithm.use_kl_loss or algorithm.kl_coef > 0) + bool(algorithm.use_opd)
    frozen += algorithm.keep_old_actor
    trained = 1 + (algorithm.advantage_estimator == "ppo")
    held = size * (trained * (DTYPE_BYTES[dtype] + FLOAT32_BYTES) + frozen * DTYPE_BYTES[dtype])
    states = size * trained * OPTIMIZER_BYTES[dtype]
    on_host = int(states * away)
    shared = states - on_host
    layout = {option_name(name): value for name, value in layout_of(config.megatron).items()}
    tensor = layout.get("tensor_model_parallel_size", 1)
    stages = layout.get("pipeline_model_parallel_size", 1)
    expert_cut = (layout.get("expert_tensor_parallel_size") or tensor) * layout.get(
        "expert_model_parallel_size", 1
    )
    # Shares of a rank: of experts, which may lie on more ranks, and of all the rest.
    of_experts = expert_parameters(shape) / size
    held_share = (of_experts / expert_cut + (1 - of_experts) / tensor) / stages
    ranks = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
    vocabulary = -(-shape.vocab_size // tensor)
    train = config.train
    tokens = train.max_tokens_per_gpu or train.micro_batch_size * _longest(config, shape)
    positions = min(tokens, max(1, LOGITS_AT_ONCE // vocabulary))
    return {
        "trainer_bytes": held + shared,
        "trainer_bytes_a_rank": int(held * held_share) + shared // max(stages * tensor, ranks),
        **({"optimizer_bytes_on_host": on_host} if on_host else {}),
        "log_prob_bytes_a_rank": LOGITS_COPIES * FLOAT32_BYTES * positions * vocabulary,
    }


def _resolved(config: RunConfig, device: Device, shape: ModelShape) -> TrainerSettings:
    """What a rank will be told; layout and states' place stand in `megatron` until then."""
    given = trainer_settings(config, device, 0, 1)
    return resolve(given, shape, declared_fields()).settings


def _policy_peak(config: RunConfig, settings: TrainerSettings, shape: ModelShape) -> int:
    """States, activations and logits of a rank that trains the policy."""
    train = config.train
    if train.max_tokens_per_gpu:  # each context-parallel rank holds as many of a pack
        tokens = train.max_tokens_per_gpu * settings.context_parallel_size
    else:
        tokens = train.micro_batch_size * _longest(config, shape)
    return trainer_memory(settings, shape, tokens).peak_bytes


def _longest(config: RunConfig, shape: ModelShape) -> int:
    """Tokens that a sequence may have."""
    rollout = config.rollout
    prompt = config.data.rollout_max_prompt_len
    both = prompt + rollout.rollout_max_response_len if prompt else shape.max_positions
    return min(rollout.rollout_max_context_len or both, shape.max_positions)
