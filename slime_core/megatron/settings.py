"""What a trainer rank is told at its start. Imports neither torch nor megatron."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.errors import ConfigError
from slime_core.plugins.args_view import ArgsView

LOGITS_AT_ONCE = 130_000_000
"""Some five float32 copies of them are alive at the peak of the backward pass: below 3 GB."""


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of one trainer rank; the same on all ranks except rank and local_rank.

    Fields with Megatron's names may also stand in `megatron`, which then wins; fields that have a
    place of their own in the configuration (lr, clip_grad, seed, batch sizes) may not.

    Attributes:
        hf_checkpoint: folder with config.json, safetensors and tokenizer.
        tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size,
        sequence_parallel: how ranks share the model.
        virtual_pipeline_model_parallel_size: parts of the model that each rank of a pipeline holds,
            each with layers of its own; none and 1 are the same.
        expert_model_parallel_size: ranks to which the experts of a layer are dealt.
        expert_tensor_parallel_size: ranks that share each expert, by default the
            tensor-parallel ones.
        megatron_load: a Megatron checkpoint whose weights take the place of hf_checkpoint's.
        device: "cpu" (gloo) or "cuda" (NCCL).
        dtype: of weights and activations. Optimizer state and gradients are float32.
        rank, world_size, local_rank: place among the trainer ranks.
        master_addr, master_port: where rank 0 listens. Unused with one rank.
        seed: of Megatron's random state.
        threads: compute threads of this process.
        collective_timeout_s: deadline of any collective between ranks.
        train_iters: optimizer steps of the whole run; the learning rate's decay refers to it.
        lr, min_lr, lr_warmup_iters, lr_warmup_init, lr_decay_style, lr_decay_iters,
        lr_wsd_decay_style, lr_wsd_decay_iters: the schedule, in optimizer steps (Megatron's
            meaning). lr_decay_iters defaults to train_iters.
        clip_grad: bound of the global gradient norm; 0 does not clip.
        weight_decay, adam_beta1, adam_beta2, adam_eps: AdamW.
        optimizer_cpu_offload: keep optimizer states, and masters of bf16 weights, in the host's
            memory between steps, see host_adam.py.
        optimizer_offload_fraction: of their elements that are kept there.
        algorithm: estimator, losses and their numbers.
        on_policy_tolerance: nats by which log-probs of trainer and engine may differ under
            true_on_policy_mode.
        args: the configuration as the functions named in `algorithm` see it.
        rollout_temperature: logits are divided by it before log-probs and entropy.
        use_dynamic_batch_size, max_tokens_per_gpu, micro_batch_size: micro-batches of training.
        overlong_policy: what becomes of rows longer than max_tokens_per_gpu, see
            batching.overlong.
        log_probs_max_tokens_per_gpu: cap of the separate forward pass; default
            max_tokens_per_gpu.
        logits_chunk_tokens: positions whose logits are in memory at once; None takes as many as
            LOGITS_AT_ONCE logits of a rank's part of the vocabulary allow.
        make_vocab_size_divisible_by: vocabulary rows are padded to a multiple of it.
        only_train_params_name_list, freeze_params_name_list: patterns, see selection.py.
        megatron: further Megatron options by name, see arguments.py.
    """

    hf_checkpoint: str
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    seed: int = 1234
    threads: int = 1
    collective_timeout_s: float = 600.0

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False

    train_iters: int = 1
    lr: float = 1e-6
    min_lr: float = 0.0
    lr_warmup_iters: int = 0
    lr_warmup_init: float = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = (
        "constant"
    )
    lr_decay_iters: int | None = None
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    lr_wsd_decay_iters: int | None = None
    clip_grad: float = 1.0
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0

    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    args: ArgsView | None = None
    on_policy_tolerance: float = 1e-5
    rollout_temperature: float = 1.0

    use_dynamic_batch_size: bool = False
    max_tokens_per_gpu: int | None = None
    micro_batch_size: int = 1
    overlong_policy: Literal["error", "truncate", "drop"] = "error"
    log_probs_max_tokens_per_gpu: int | None = None
    logits_chunk_tokens: int | None = None
    make_vocab_size_divisible_by: int = 128

    megatron_load: str | None = None
    only_train_params_name_list: Sequence[str] | None = None
    freeze_params_name_list: Sequence[str] | None = None
    megatron: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    @property
    def virtual_stages(self) -> int | None:
        """Parts of the model that a rank of an interleaved pipeline holds; None in all others."""
        size = self.virtual_pipeline_model_parallel_size
        return None if size == 1 else size

    @property
    def expert_cut(self) -> int:
        """Ranks among which the experts of a layer are dealt."""
        return self.expert_tensor_size * self.expert_model_parallel_size

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share each expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.model_parallel_size

    def logits_chunk(self, vocab_size: int) -> int:
        """Positions whose logits are computed at once, for a (padded) vocabulary."""
        local = -(-vocab_size // self.tensor_model_parallel_size)
        return self.logits_chunk_tokens or max(1, LOGITS_AT_ONCE // local)

    def check(self) -> None:
        """Refuses what cannot work.

        Raises:
            ConfigError: names the settings and the fix.
        """
        if self.world_size % self.model_parallel_size:
            raise ConfigError(
                f"{self.world_size} trainer ranks are not a multiple of "
                f"tensor_model_parallel_size {self.tensor_model_parallel_size} x "
                f"pipeline_model_parallel_size {self.pipeline_model_parallel_size} x "
                f"context_parallel_size {self.context_parallel_size}"
            )
        ranks = self.world_size // self.pipeline_model_parallel_size
        if ranks % self.expert_cut:
            raise ConfigError(
                f"expert_model_parallel_size {self.expert_model_parallel_size} x "
                f"expert_tensor_parallel_size {self.expert_tensor_size} = {self.expert_cut} does "
                f"not divide the {ranks} trainer ranks of a pipeline stage: experts are dealt to "
                "tensor-, context- and data-parallel ranks"
            )
        if self.expert_tensor_size > self.tensor_model_parallel_size:
            raise ConfigError(
                f"expert_tensor_parallel_size {self.expert_tensor_size} is above "
                f"tensor_model_parallel_size {self.tensor_model_parallel_size}: ranks with other "
                "tokens would share an expert, which is not there yet; use at most that"
            )
        if (
            self.device == "cpu"
            and self.expert_model_parallel_size > 1
            and self.expert_tensor_size > 1
        ):
            raise ConfigError(
                f"expert_model_parallel_size {self.expert_model_parallel_size} with "
                f"expert_tensor_parallel_size {self.expert_tensor_size}: ranks on CPUs cannot "
                "gather unequal numbers of tokens (gloo): use expert_tensor_parallel_size 1"
            )
        if self.virtual_stages and self.pipeline_model_parallel_size == 1:
            raise ConfigError(
                f"virtual_pipeline_model_parallel_size {self.virtual_stages} needs "
                "pipeline_model_parallel_size above 1: a pipeline of one stage has no turns to take"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError("sequence_parallel needs tensor_model_parallel_size above 1")
        if self.world_size > 1 and not self.master_port:
            raise ConfigError("more than one trainer rank needs master_port")
        if self.use_dynamic_batch_size and not self.max_tokens_per_gpu:
            raise ConfigError("use_dynamic_batch_size needs max_tokens_per_gpu")
        if self.algorithm.loss_type == "custom_loss" and self.tensor_model_parallel_size > 1:
            raise ConfigError(
                "custom_loss_function_path gets whole logits, which tensor-parallel ranks do not "
                "hold: use tensor_model_parallel_size 1"
            )
        if self.rollout_temperature <= 0:
            raise ConfigError(
                f"rollout_temperature {self.rollout_temperature}: log-probs of greedy decoding "
                "are undefined; use a value above 0"
            )
        if self.optimizer_offload_fraction != 1.0 and not self.optimizer_cpu_offload:
            raise ConfigError(
                f"optimizer_offload_fraction {self.optimizer_offload_fraction} has no meaning "
                "without optimizer_cpu_offload: set both, or leave it out"
            )
        decay_iters = self.lr_decay_iters or self.train_iters
        if self.lr_warmup_iters and self.lr_warmup_iters >= decay_iters:
            raise ConfigError(
                f"lr_warmup_iters {self.lr_warmup_iters} must be below lr_decay_iters "
                f"(or train_iters) {decay_iters}"
            )
        if self.min_lr > self.lr:
            raise ConfigError(f"min_lr {self.min_lr} is above lr {self.lr}")
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None:
            raise ConfigError("lr_decay_style WSD needs lr_wsd_decay_iters")
