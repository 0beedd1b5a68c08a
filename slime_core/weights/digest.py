"""Digests over named tensors: equal if and only if names, dtypes, shapes and bytes are equal."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import xxhash


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order, without a copy where it lies so on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    # `.numpy()` would forbid for ever that the tensor's memory is freed in place (sleep.py).
    return np.from_dlpack(flat.view(torch.uint8)).data


class TensorsDigest:
    """Collects named tensors one at a time; their order does not matter."""

    def __init__(self) -> None:
        self._rows: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        content = xxhash.xxh3_128_hexdigest(tensor_bytes(tensor))
        self._rows[name] = f"{name}|{dtype}|{list(tensor.shape)}|{content}"

    def hexdigest(self) -> str:
        """32 hex digits."""
        body = "\n".join(self._rows[name] for name in sorted(self._rows))
        return xxhash.xxh3_128_hexdigest(body.encode())


def tensors_digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """xxh3-128 (hex) over named tensors, whatever their order."""
    digest = TensorsDigest()
    for name, tensor in named:
        digest.add(name, tensor)
    return digest.hexdigest()
