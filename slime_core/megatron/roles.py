"""Further policies of the same architecture: weights that take the actor's place for a pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slime_core.megatron import parallel
from slime_core.megatron.checkpoint import read_sharded
from slime_core.megatron.checkpoint_writer import StagedSave
from slime_core.megatron.chunks import Chunks, load_states, named_parameters, sharded_states
from slime_core.megatron.digest import weights_digest
from slime_core.megatron.foreign import read_weights
from slime_core.megatron.model import load_weights
from slime_core.weights.megatron_folder import is_megatron
from slime_core.weights.tables import ModelShape


class HeldWeights:
    """A copy of all weights in host memory. Only while it is in use, it is also on the device.

    The actor's own weights stay where they are: parameters point elsewhere for the time of a pass,
    and nothing of the actor is copied.
    """

    def __init__(self, chunks: Chunks, shape: ModelShape) -> None:
        """Starts as a copy of the model's present weights."""
        self._chunks = chunks
        self._shape = shape
        self._held = {name: _to_host(p) for name, p in named_parameters(chunks).items()}

    @contextmanager
    def in_use(self, *, changes: bool = False) -> Iterator[Chunks]:
        """The model computes with these weights inside the block.

        Args:
            changes: keep what the block writes into the parameters.
        """
        parameters = named_parameters(self._chunks)
        own = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = self._held[name].to(parameter.device, non_blocking=True)
            yield self._chunks
            if changes:
                self._held = {name: _to_host(p) for name, p in parameters.items()}
        finally:
            for name, parameter in parameters.items():
                parameter.data = own[name]

    def copy_actor(self) -> None:
        """Becomes a copy of the actor."""
        self._held = {name: _to_host(p) for name, p in named_parameters(self._chunks).items()}

    def read(self, checkpoint: str) -> None:
        """Takes the weights of a Hugging Face folder, or of a Megatron checkpoint.

        Raises:
            ConfigError: they do not fit the model.
        """
        with self.in_use(changes=True) as chunks:
            if is_megatron(Path(checkpoint)):
                read_weights(chunks, checkpoint)
            else:
                load_weights(chunks, self._shape, checkpoint)

    def digest(self, role: str) -> str:
        """See digest.weights_digest. A collective."""
        with self.in_use() as chunks:
            return weights_digest(chunks, self._shape, role)

    def stage(self, folder: Path, copied: bool) -> StagedSave:
        """Stages the weights in a form for any layout. A collective."""
        with self.in_use() as chunks:
            return StagedSave(_sharded(chunks), folder, copied=copied)

    def load(self, folder: Path) -> None:
        """Reads what `stage` wrote. A collective.

        Raises:
            TrainerError: nothing there.
        """
        with self.in_use(changes=True) as chunks:
            load_states(chunks, read_sharded(_sharded(chunks), folder))


def _sharded(chunks: Chunks) -> dict[str, Any]:
    return sharded_states(chunks, {"dp_cp_group": parallel.replica_group()})


def _to_host(parameter: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, pinned where it travels to a GPU."""
    copied = parameter.detach().to("cpu", copy=True)
    return copied.pin_memory() if parameter.is_cuda else copied
