"""From the run's configuration to the settings of one trainer rank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.cluster.engine_choice import resolve_engine
from slime_core.config.secrets import hidden
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError
from slime_core.megatron.settings import TrainerSettings
from slime_core.plugins.args_view import ArgsView
from slime_core.weights.sync.canary import tolerance_for


def model_facts(hf_checkpoint: str) -> dict[str, Any]:
    """vocab_size, max_positions and dtype of a Hugging Face model folder.

    Raises:
        ConfigError: no such folder, or no config.json in it.
    """
    path = Path(hf_checkpoint) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"hf_checkpoint {hf_checkpoint}: no config.json there; give the folder of a Hugging "
            "Face model (config.json, *.safetensors, tokenizer)"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid JSON: {error}") from error
    missing = [key for key in ("vocab_size", "max_position_embeddings") if key not in config]
    if missing:
        raise ConfigError(f"{path}: {', '.join(missing)} is missing")
    return {
        "vocab_size": int(config["vocab_size"]),
        "max_positions": int(config["max_position_embeddings"]),
        "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        "model_type": config.get("model_type", ""),
    }


def training_dtype(config: RunConfig, model_dtype: str) -> Literal["float32", "bfloat16"]:
    """bf16 if Megatron's option says so, else the model's own precision.

    Raises:
        ConfigError: fp16, which is not there yet.
    """
    if config.megatron.get("fp16"):
        raise ConfigError("megatron: fp16 is not there yet; use bf16 or neither (fp32)")
    bf16 = config.megatron.get("bf16", model_dtype != "float32")
    return "bfloat16" if bf16 else "float32"


def trainer_settings(
    config: RunConfig, device: Literal["cpu", "cuda"], rank: int, master_port: int
) -> TrainerSettings:
    """Settings of one rank.

    Args:
        device: where the ranks run.
        rank: place among the ranks.
        master_port: where rank 0 listens.
    """
    rollout, train = config.rollout, config.train
    ranks_per_node = config.cluster.actor_num_gpus_per_node
    taken = {"bf16", "fp16"}
    dtype = training_dtype(config, model_facts(rollout.hf_checkpoint)["dtype"])
    return TrainerSettings(
        hf_checkpoint=rollout.hf_checkpoint,
        device=device,
        dtype=dtype,
        rank=rank,
        world_size=config.cluster.actor_num_nodes * ranks_per_node,
        local_rank=rank % ranks_per_node,
        master_port=master_port,
        seed=config.run.seed,
        threads=config.cluster.threads_per_process,
        collective_timeout_s=config.fault_tolerance.stage_timeout_s,
        train_iters=_train_iters(config),
        lr=train.lr,
        clip_grad=train.clip_grad,
        algorithm=algorithm_settings(config),
        args=ArgsView(hidden(config)),
        on_policy_tolerance=tolerance_for(
            dtype, config.sync.canary_tolerance, resolve_engine(config, device)
        ),
        rollout_temperature=rollout.rollout_temperature,
        use_dynamic_batch_size=train.use_dynamic_batch_size,
        max_tokens_per_gpu=train.max_tokens_per_gpu,
        micro_batch_size=train.micro_batch_size,
        overlong_policy=train.overlong_policy,
        megatron_load=rollout.megatron_load,
        only_train_params_name_list=train.only_train_params_name_list,
        freeze_params_name_list=train.freeze_params_name_list,
        megatron={name: value for name, value in config.megatron.items() if name not in taken},
    )


def algorithm_settings(config: RunConfig) -> AlgorithmSettings:
    """The fields of the group `algorithm` that the trainer needs; pack uses the others."""
    names = {field.name for field in dataclasses.fields(AlgorithmSettings)}
    values = {name: value for name, value in config.algorithm if name in names}
    return AlgorithmSettings(**values, max_response_len=config.rollout.rollout_max_response_len)


def _train_iters(config: RunConfig) -> int:
    """Optimizer steps of the run. A constant learning rate has nothing to decay over, so a run
    shorter than its warm-up is fine there."""
    steps = max(1, config.run.num_rollout * config.num_steps)
    if config.megatron.get("lr_decay_style", "constant") != "constant":
        return steps
    return max(steps, int(config.megatron.get("lr_warmup_iters", 0)) + 1)
