"""What answers and grades prompts, made from the configuration: for a run's worker, and for an
evaluation without a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from slime_core.config.tree import RunConfig
from slime_core.engines.client import EngineClient
from slime_core.rewards.hub import RewardSettings
from slime_core.rollout.generate import Sampling
from slime_core.rollout.routed import RouteAsk
from slime_core.weights.tables import read_shape


def sampling_of(config: RunConfig) -> Sampling:
    """How the training samples."""
    rollout = config.rollout
    params = {
        "temperature": rollout.rollout_temperature,
        "top_p": rollout.rollout_top_p,
        "top_k": rollout.rollout_top_k,
        "stop": rollout.rollout_stop or None,
        "stop_token_ids": rollout.rollout_stop_token_ids or None,
        "skip_special_tokens": rollout.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    timeout_s = config.fault_tolerance.request_timeout_s
    context, routes = rollout.rollout_max_context_len, None
    if config.algorithm.use_rollout_routing_replay:
        shape = read_shape(rollout.hf_checkpoint)
        routes = RouteAsk(shape.num_layers, shape.experts_per_token or 0)
    return Sampling(rollout.rollout_max_response_len, params, timeout_s, context, routes)


def reward_settings(config: RunConfig, tokenizer: Any) -> RewardSettings:
    """How answers are graded."""
    rewards = config.rewards
    end_tokens = [tokenizer.eos_token, tokenizer.pad_token]
    return RewardSettings(
        rm_type=rewards.rm_type,
        custom_rm_path=rewards.custom_rm_path,
        reward_key=rewards.reward_key,
        eval_reward_key=config.eval.eval_reward_key,
        group_rm=rewards.group_rm,
        rm_url=rewards.rm_url,
        reward_timeout_s=rewards.reward_timeout_s,
        reward_workers=rewards.reward_workers,
        end_tokens=tuple(token for token in end_tokens if token),
    )


def vocab_size_of(hf_checkpoint: str) -> int | None:
    """Rows of the model's embedding by its config.json, None where that does not say."""
    try:
        told = json.loads((Path(hf_checkpoint) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = told.get("vocab_size") or (told.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def threads_of(config: RunConfig) -> asyncio.Semaphore:
    """Places of plain generate functions, one for each sequence that the engines take at once, as
    slime has it: more threads would only wait."""
    cluster = config.cluster
    engines = max(1, cluster.rollout_num_gpus // cluster.rollout_num_gpus_per_engine)
    return asyncio.Semaphore(engines * config.rollout.sglang_server_concurrency)


def client_of(config: RunConfig, url: str) -> EngineClient:
    """A client whose requests have the configured deadline."""
    return EngineClient(url, generate_timeout_s=config.fault_tolerance.request_timeout_s)
