"""The shapes of a checkpoint's tensors, from the headers of its safetensors files alone."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LENGTH_BYTES = 8
LFS_POINTER = b"version https://git-lfs"
AGAIN = "copy or download it again"


@dataclass(frozen=True)
class TensorHeader:
    """Where a tensor stands, and its shape."""

    file: str
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of a model folder by name.

    Raises:
        ConfigError: no safetensors there, or a file is missing, cut off or damaged.
    """
    found: dict[str, TensorHeader] = {}
    for name in _files(folder):
        for tensor, entry in _header(folder / name).items():
            found[tensor] = TensorHeader(name, tuple(entry["shape"]))
    return found


def _files(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.exists():
        if (folder / SINGLE).exists():
            return [SINGLE]
        others = [path.name for path in folder.glob("*.bin")]
        hint = f" (there is {others[0]}: convert it with save_pretrained)" if others else ""
        raise ConfigError(f"{folder} has no weights: {SINGLE} or {INDEX} is needed{hint}")
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        return sorted({str(name) for name in content["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {AGAIN}") from error


def _header(path: Path) -> dict[str, Any]:
    """Tensor name -> entry. The file must be as long as its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(LENGTH_BYTES)
            length = struct.unpack("<Q", start)[0] if len(start) == LENGTH_BYTES else size
            text = file.read(length) if length <= size else b""
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing, though {INDEX} names it: {AGAIN}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if start == LFS_POINTER[:LENGTH_BYTES]:
        raise ConfigError(f"{path} is a pointer of Git LFS, not the weights: run `git lfs pull`")
    if len(text) < length or not length:
        raise ConfigError(f"{path} is cut off: it has only {size} bytes: {AGAIN}")
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a safetensors file, or damaged: {AGAIN}") from error
    whole = LENGTH_BYTES + length + end
    if whole != size:
        raise ConfigError(f"{path} is cut off or damaged: {size} of {whole} bytes: {AGAIN}")
    return entries
