"""The experts that a model's routers chose, token by token and layer by layer."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slime_core.errors import EngineError

ROUTER = "Qwen3MoeTopKRouter"
"""A module of transformers that gives logits, weights and numbers of the chosen experts."""


class RouteTap:
    """Keeps what the routers of a model chose in its last forward pass."""

    def __init__(self, module: torch.nn.Module, layers: int) -> None:
        """
        Args:
            layers: of the model; those without experts get zeros.

        Raises:
            EngineError: it has no routers that are known here.
        """
        self._layers = layers
        self._chosen: dict[int, torch.Tensor] = {}
        for name, router in module.named_modules():
            if type(router).__name__ == ROUTER:
                (number,) = map(int, re.findall(r"\.layers\.(\d+)\.", name))
                router.register_forward_hook(lambda _, __, out, at=number: self._keep(at, out))
                self._chosen[number] = torch.empty(0)
        if not self._chosen:
            raise EngineError(
                f"--enable-return-routed-experts: {type(module).__name__} has no routers that the "
                "embedded engine knows; leave the option out, or serve the model with SGLang"
            )

    def last(self, rows: int, width: int) -> np.ndarray:
        """int32 [rows, width, layers, k] of the last pass, which had rows x width tokens."""
        some = next(iter(self._chosen.values()))
        found = np.zeros((rows, width, self._layers, some.shape[-1]), dtype=np.int32)
        for number, chosen in self._chosen.items():
            found[:, :, number] = chosen.view(rows, width, -1).cpu().numpy()
        return found

    def _keep(self, layer: int, out: Any) -> None:
        self._chosen[layer] = out[2]


def as_text(rows: Sequence[np.ndarray], start: int, end: int) -> str:
    """Tokens `start` to `end` as SGLang sends them: int32 [tokens, layers, k] in base64."""
    return base64.b64encode(np.concatenate(rows)[start:end].tobytes()).decode()
