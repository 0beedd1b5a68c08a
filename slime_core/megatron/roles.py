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
from slime_core.megatron.digest import weights_digest
from slime_core.megatron.foreign import read_weights
from slime_core.megatron.model import PolicyModel, load_weights
from slime_core.weights.megatron_folder import is_megatron
from slime_core.weights.tables import ModelShape


class HeldWeights:
    """A copy of all weights in host memory. Only while it is in use, it is also on the device.

    The actor's own weights stay where they are: parameters point elsewhere for the time of a pass,
    and nothing of the actor is copied.
    """

    def __init__(self, model: PolicyModel, shape: ModelShape) -> None:
        """Starts as a copy of the model's present weights."""
        self._model = model
        self._shape = shape
        self._held = {name: _to_host(p) for name, p in model.named_parameters()}

    @contextmanager
    def in_use(self, *, changes: bool = False) -> Iterator[PolicyModel]:
        """The model computes with these weights inside the block.

        Args:
            changes: keep what the block writes into the parameters.
        """
        parameters = dict(self._model.named_parameters())
        own = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = self._held[name].to(parameter.device, non_blocking=True)
            yield self._model
            if changes:
                self._held = {name: _to_host(p) for name, p in parameters.items()}
        finally:
            for name, parameter in parameters.items():
                parameter.data = own[name]

    def copy_actor(self) -> None:
        """Becomes a copy of the actor."""
        self._held = {name: _to_host(p) for name, p in self._model.named_parameters()}

    def read(self, checkpoint: str) -> None:
        """Takes the weights of a Hugging Face folder, or of a Megatron checkpoint.

        Raises:
            ConfigError: they do not fit the model.
        """
        with self.in_use(changes=True) as model:
            if is_megatron(Path(checkpoint)):
                read_weights(model, checkpoint)
            else:
                load_weights(model, self._shape, checkpoint)

    def digest(self, role: str) -> str:
        """See digest.weights_digest. A collective."""
        with self.in_use() as model:
            return weights_digest(model, self._shape, role)

    def stage(self, folder: Path, copied: bool) -> StagedSave:
        """Stages the weights in a form for any layout. A collective."""
        with self.in_use() as model:
            return StagedSave(_sharded(model), folder, copied=copied)

    def load(self, folder: Path) -> None:
        """Reads what `stage` wrote. A collective.

        Raises:
            TrainerError: nothing there.
        """
        with self.in_use(changes=True) as model:
            model.load_state_dict(read_sharded(_sharded(model), folder)["model"])


def _sharded(model: PolicyModel) -> dict[str, Any]:
    metadata = {"dp_cp_group": parallel.replica_group()}
    return {"model": model.sharded_state_dict(metadata=metadata)}


def _to_host(parameter: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, pinned where it travels to a GPU."""
    copied = parameter.detach().to("cpu", copy=True)
    return copied.pin_memory() if parameter.is_cuda else copied
