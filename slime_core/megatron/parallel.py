"""Process group and Megatron's parallel state of one trainer rank."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch._C._distributed_c10d import HashStore, TCPStore

from slime_core.errors import TrainerError
from slime_core.megatron.settings import TrainerSettings


def start(settings: TrainerSettings) -> None:
    """Joins the process group and builds Megatron's groups.

    Raises:
        TrainerError: this process already trains, or the other ranks did not come in time.
    """
    if dist.is_initialized():
        raise TrainerError("this process already belongs to a trainer; close it first")
    timeout = datetime.timedelta(seconds=settings.collective_timeout_s)
    if settings.device == "cuda":
        torch.cuda.set_device(settings.local_rank)
    if _is_loopback(settings.master_addr):
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            backend="nccl" if settings.device == "cuda" else "gloo",
            store=_store(settings, timeout),
            rank=settings.rank,
            world_size=settings.world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise TrainerError(
            f"trainer rank {settings.rank} of {settings.world_size} could not join at "
            f"{settings.master_addr}:{settings.master_port}: {error}"
        ) from error
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tensor_model_parallel_size,
        pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=settings.virtual_stages,
        context_parallel_size=settings.context_parallel_size,
        expert_model_parallel_size=settings.expert_model_parallel_size,
        expert_tensor_parallel_size=settings.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(settings.collective_timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)
    torch.manual_seed(settings.seed)


def stop() -> None:
    """Leaves the groups, so that another trainer may start in this process."""
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()
    if dist.is_initialized():
        dist.destroy_process_group()


def tensor_group(*, expert: bool = False) -> dist.ProcessGroup:
    """Ranks that hold parts of the same tensors; of experts' tensors if told so."""
    if expert:
        return cast(dist.ProcessGroup, parallel_state.get_expert_tensor_parallel_group())
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def expert_group() -> dist.ProcessGroup:
    """Ranks that hold other experts of the same layers."""
    return cast(dist.ProcessGroup, parallel_state.get_expert_model_parallel_group())


def experts_apart() -> bool:
    """Whether experts lie on ranks in another way than all other parameters."""
    same = tensor_group(expert=True).size() == tensor_group().size()
    return not (same and expert_group().size() == 1)


def replica_rank(*, expert: bool = False) -> int:
    """This rank's place among those with the same parameters; of the same experts if told so."""
    if expert:
        return parallel_state.get_expert_data_parallel_rank()
    return parallel_state.get_data_parallel_rank(with_context_parallel=True)


def own_experts(experts: int) -> range:
    """Which of a layer's experts this rank holds."""
    group = expert_group()
    count = experts // group.size()
    return range(group.rank() * count, (group.rank() + 1) * count)


def pipeline_group() -> dist.ProcessGroup:
    """Ranks that hold consecutive layers."""
    return cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def replica_group() -> dist.ProcessGroup:
    """Ranks that hold the same parameters and see other rows, or other tokens of the same."""
    return cast(
        dist.ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True)
    )


def stage_group() -> dist.ProcessGroup:
    """All ranks that compute the same layers, of whatever tokens."""
    return cast(
        dist.ProcessGroup,
        parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    )


def context_group() -> dist.ProcessGroup:
    """Ranks that hold other tokens of the same sequences."""
    return cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())


def device_of(settings: TrainerSettings) -> torch.device:
    """Where this rank's tensors live."""
    if settings.device == "cuda":
        return torch.device("cuda", settings.local_rank)
    return torch.device("cpu")


def everyone_agrees(value: int, device: torch.device) -> bool:
    """True if all ranks passed the same 63-bit number. A collective."""
    if dist.get_world_size() == 1:
        return True
    low = torch.tensor([value, -value], dtype=torch.int64, device=device)
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    return bool(low[0] == -low[1])


def gather_objects(value: Any) -> list[Any]:
    """Every rank's value, in rank order. A collective."""
    if dist.get_world_size() == 1:
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def gather_pipeline(value: Any) -> list[Any]:
    """The value of every pipeline stage, in stage order. A collective."""
    group = pipeline_group()
    if group.size() == 1:
        return [value]
    out: list[Any] = [None] * group.size()
    dist.all_gather_object(out, value, group=group)
    return out


def from_first_rank(value: Any) -> Any:
    """Rank 0's value on every rank. A collective."""
    return gather_objects(value)[0]


def sum_over_data_parallel(values: torch.Tensor) -> torch.Tensor:
    """In-place sum over the ranks that see other rows."""
    group = _data_group()
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def _data_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_data_parallel_group())


def max_over_data_parallel(values: torch.Tensor) -> torch.Tensor:
    """In-place maximum over the ranks that see other rows."""
    group = _data_group()
    if group.size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """In-place broadcast from the last pipeline stage to the others."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            values,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=pipeline_group(),
        )
    return values


def object_from_last_stage(value: Any) -> Any:
    """The last pipeline stage's value on every stage. A collective."""
    return gather_pipeline(value)[-1]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _store(settings: TrainerSettings, timeout: datetime.timedelta) -> Any:
    """The rendezvous. One rank needs no port; else rank 0 listens on master_addr only."""
    if settings.world_size == 1:
        return HashStore()
    listener = None
    if settings.rank == 0:
        listener = socket.create_server((settings.master_addr, settings.master_port))
    return TCPStore(
        settings.master_addr,
        settings.master_port,
        settings.world_size,
        is_master=settings.rank == 0,
        timeout=timeout,
        master_listen_fd=None if listener is None else listener.detach(),
    )
