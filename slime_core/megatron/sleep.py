"""A trainer's sleep: what it holds on its device goes to host memory, and comes back bit for bit.

Storages are emptied and filled again in place, so every view of them (parameters in Megatron's
buffers, shards in the optimizer) stays what it is, and nothing has to be pointed anew. Megatron's
own calls for this move the optimizer's tensors alone and leave the weights on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state

from slime_core.errors import TrainerError
from slime_core.megatron.host_memory import PIECE_BYTES, host_pieces
from slime_core.megatron.optimizer import TrainState, members

if TYPE_CHECKING:
    from slime_core.megatron.trainer import PolicyTrainer


class Sleep:
    """Host copies of a trainer's weights, optimizer states and buffers, whose device memory is
    free until `end`.

    Policies that are held besides (roles.HeldWeights) lie in host memory at all times, and so do
    optimizer states where optimizer_cpu_offload keeps them there.

    Attributes:
        kept_bytes: copied to the host.
        dropped_bytes: of gradients, which the next step clears anyway.
    """

    def __init__(self, trainer: PolicyTrainer, piece_bytes: int = PIECE_BYTES) -> None:
        """Begins it. No collective."""
        states = _states(trainer)
        for state in states:
            state.optimizer.zero_grad()
        device = trainer.policy.passes.device
        kept = _storages(_kept(states), device)
        dropped = _storages(_gradients(states), device)
        self._kept = list(kept.values())
        self._dropped = [held for address, held in dropped.items() if address not in kept]
        self._sizes = {id(held): held.nbytes() for held in (*self._kept, *self._dropped)}
        self.kept_bytes = sum(held.nbytes() for held in self._kept)
        self.dropped_bytes = sum(held.nbytes() for held in self._dropped)
        self._pieces = _pieces(self.kept_bytes, piece_bytes, pinned=device.type == "cuda")
        for host, own in self._pairs():
            host.copy_(own, non_blocking=True)
        torch.cuda.synchronize()
        for held in (*self._kept, *self._dropped):
            held.resize_(0)
        parallel_state.get_global_memory_buffer().buffer.clear()
        torch.cuda.empty_cache()

    def end(self) -> None:
        """Brings everything back; gradients are zero. No collective.

        Raises:
            TrainerError: others have taken the memory of the device meanwhile.
        """
        try:
            for held in (*self._kept, *self._dropped):
                held.resize_(self._sizes[id(held)])
        except torch.OutOfMemoryError as error:
            raise TrainerError(
                f"the trainer cannot wake: the GPU has no room for its "
                f"{self.kept_bytes + self.dropped_bytes} bytes; give the engines less of it "
                "(--sglang-mem-fraction-static)"
            ) from error
        for host, own in self._pairs():
            own.copy_(host, non_blocking=True)
        for held in self._dropped:
            _bytes(held).zero_()
        torch.cuda.synchronize()
        self._pieces = []

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Equal parts of the host's pieces and of the device's storages, in order."""
        pieces = iter(self._pieces)
        host = torch.empty(0, dtype=torch.uint8)
        for held in self._kept:
            own = _bytes(held)
            while len(own):
                if not len(host):
                    host = next(pieces)
                count = min(len(host), len(own))
                yield host[:count], own[:count]
                host, own = host[count:], own[count:]


def _states(trainer: PolicyTrainer) -> list[TrainState]:
    critic = [] if trainer.critic is None else [trainer.critic.passes.state]
    return [trainer.state, *critic]


def _kept(states: Sequence[TrainState]) -> Iterator[torch.Tensor]:
    """Weights, buffers of modules, master weights and optimizer states."""
    for state in states:
        for model in state.models:
            yield from model.parameters()
            yield from model.buffers()
        for buffer in _buffers(state):
            if buffer.param_data is not None:
                yield buffer.param_data
        for member in members(state.optimizer):
            adam: Any = member.optimizer
            for group in adam.param_groups if adam is not None else ():
                yield from group["params"]
            for values in adam.state.values() if adam is not None else ():
                yield from (value for value in values.values() if torch.is_tensor(value))


def _gradients(states: Sequence[TrainState]) -> Iterator[torch.Tensor]:
    for state in states:
        yield from (buffer.grad_data for buffer in _buffers(state))


def _buffers(state: TrainState) -> Iterator[Any]:
    """Megatron's buffers of parameters and gradients."""
    for chunk in state.chunks:
        yield from chunk.buffers  # type: ignore[misc]
        yield from chunk.expert_parallel_buffers


def _storages(
    tensors: Iterable[torch.Tensor], device: torch.device
) -> dict[int, torch.UntypedStorage]:
    """The storages on the device that are not empty, each once, by address."""
    found = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type)
    return {held.data_ptr(): held for held in found if held.nbytes()}


def _pieces(size: int, most: int, *, pinned: bool) -> list[torch.Tensor]:
    """Host memory of `size` bytes together.

    Raises:
        TrainerError: there is not so much.
    """
    return host_pieces(
        [min(most, size - start) for start in range(0, size, most)],
        torch.uint8,
        pinned=pinned,
        who="the trainer cannot sleep",
        fix="leave offload_train out",
    )


def _bytes(held: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage, uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=held.device).set_(held)
