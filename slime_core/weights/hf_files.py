"""Reading the safetensors of a Hugging Face checkpoint, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from slime_core.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class HFTensors:
    """The tensors of a checkpoint folder, read on demand (memory-mapped). A context manager.

    Raises:
        ConfigError: no safetensors in the folder, or one is damaged.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        self.folder = Path(checkpoint)
        self._open: dict[str, safe_open] = {}
        self._file_of: dict[str, str] = self._read_index()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU.

        Raises:
            ConfigError: the checkpoint has no such tensor.
        """
        if name not in self._file_of:
            raise ConfigError(f"{self.folder} has no tensor {name!r}, which its config.json needs")
        return self._handle(self._file_of[name]).get_tensor(name)

    def __enter__(self) -> HFTensors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.clear()

    def _read_index(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.exists():
            try:
                return dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{index} is not a safetensors index: {error}") from error
        if not (self.folder / SINGLE).exists():
            raise ConfigError(
                f"{self.folder} has no {SINGLE} or {INDEX}; only safetensors are read "
                "(convert .bin files with transformers' save_pretrained)"
            )
        return dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)

    def _handle(self, file: str) -> safe_open:
        if file not in self._open:
            path = self.folder / file
            try:
                self._open[file] = safe_open(str(path), framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
        return self._open[file]
