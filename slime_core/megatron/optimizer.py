"""Megatron's DDP, distributed optimizer and schedule, and the step from gradients to weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime_core.errors import ConfigError
from slime_core.megatron.arguments import ResolvedOptions
from slime_core.megatron.host_adam import HostAdam
from slime_core.megatron.model import DTYPES, PolicyModel
from slime_core.megatron.settings import TrainerSettings


@dataclass(frozen=True)
class TrainState:
    """Everything that changes in training.

    Attributes:
        chunks: the DDP-wrapped chunks of the model; one but in an interleaved pipeline.
        optimizer, scheduler: AdamW with sharded float32 state, and its learning rate.
    """

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @property
    def models(self) -> list[PolicyModel]:
        """What is inside DDP."""
        return [cast(PolicyModel, chunk.module) for chunk in self.chunks]

    @property
    def model(self) -> PolicyModel:
        """This rank's last chunk, with the head where the rank is the pipeline's last."""
        return self.models[-1]

    @property
    def lr(self) -> float:
        """The learning rate that the next step will use."""
        return float(self.optimizer.param_groups[0]["lr"])


def build_train_state(
    models: Sequence[PolicyModel], settings: TrainerSettings, options: ResolvedOptions
) -> TrainState:
    """Wraps the chunks of a model for training."""
    ddp: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": True,
        "check_for_nan_in_grad": False,  # read_gradients looks, and the step is skipped
    }
    config = models[0].config
    chunks = [
        DistributedDataParallel(config, DistributedDataParallelConfig(**(ddp | options.ddp)), model)
        for model in models
    ]
    config.finalize_model_grads_func = _sum_gradients
    if chunks[0].ddp_config.overlap_grad_reduce:
        waits: list[Any] = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]  # type: ignore[assignment]
    optimizer = get_megatron_optimizer(_optimizer_config(settings, options), list(chunks))
    if settings.optimizer_cpu_offload:
        _keep_on_host(optimizer, next(models[0].parameters()).device, settings)
    return TrainState(chunks, optimizer, _scheduler(optimizer, settings))


def _optimizer_config(settings: TrainerSettings, options: ResolvedOptions) -> OptimizerConfig:
    dtype = DTYPES[settings.dtype]
    fields: dict[str, Any] = {
        "optimizer": "adam",
        "lr": settings.lr,
        "min_lr": settings.min_lr,
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.adam_beta1,
        "adam_beta2": settings.adam_beta2,
        "adam_eps": settings.adam_eps,
        "clip_grad": settings.clip_grad,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": True,
    }
    return OptimizerConfig(**(fields | options.optimizer))


def _keep_on_host(
    optimizer: MegatronOptimizer, device: torch.device, settings: TrainerSettings
) -> None:
    """Puts a HostAdam into each optimizer of the chain.

    Raises:
        ConfigError: Adam is not torch's own.
    """
    for member in members(optimizer):
        adam: Any = member.optimizer
        if adam is None:  # this rank has none of its parameters
            continue
        if not isinstance(adam, torch.optim.Adam):
            raise ConfigError(
                f"optimizer_cpu_offload needs torch's AdamW, but {type(adam).__module__} is "
                "installed and gives Megatron another: leave the option out, or uninstall that"
            )
        groups: list[list[torch.Tensor]] = cast(Any, member).shard_fp32_from_float16_groups
        masters = [master for group in groups for master in group]
        member.optimizer = HostAdam(adam, masters, device, settings.optimizer_offload_fraction)


def _scheduler(optimizer: MegatronOptimizer, settings: TrainerSettings) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,  # type: ignore[arg-type]
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=settings.lr_decay_iters or settings.train_iters,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=settings.train_iters,
        wd_incr_style="constant",
        # The configuration decides; a checkpoint contributes only the number of steps.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=settings.lr_wsd_decay_iters,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )


def _sum_gradients(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron's finalisation without its division: the loss carries its own denominators."""
    finalize_model_grads(model, None, **kwargs)


def zero_gradients(state: TrainState) -> None:
    """Clears gradient buffers before a step."""
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()


def members(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers inside a chain."""
    if isinstance(optimizer, ChainedOptimizer):
        return list(optimizer.chained_optimizers)
    return [optimizer]


def _on_host(state: TrainState) -> list[HostAdam]:
    found = (member.optimizer for member in members(state.optimizer))
    return [adam for adam in found if isinstance(adam, HostAdam)]


def read_gradients(state: TrainState) -> tuple[bool, float]:
    """Whether all gradients on all ranks are finite, and their norm before clipping.

    The norm is global, so all ranks decide alike.
    """
    with ExitStack() as stack:
        for adam in _on_host(state):
            stack.enter_context(adam.taking_gradients())
        found_inf = state.optimizer.prepare_grads()
    norm = state.optimizer.get_grad_norm()
    grad_norm = float(norm) if norm is not None else 0.0
    return not found_inf and math.isfinite(grad_norm), grad_norm


def take_step(state: TrainState, grad_norm: float) -> None:
    """Clips by the norm of `read_gradients`, updates the weights and moves the schedule."""
    for member in members(state.optimizer):
        parameters = cast(list[torch.Tensor], member.get_parameters())
        if member.config.clip_grad > 0.0 and parameters:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=member.config.clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=member.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    with ExitStack() as stack:
        for adam in _on_host(state):
            stack.enter_context(adam.masters_on_device())
        state.optimizer.step_with_ready_grads()
    state.scheduler.step(1)
