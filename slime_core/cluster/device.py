"""Which device a run computes on. Imports neither torch nor Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError

Device = Literal["cpu", "cuda"]


def resolve_device(config: RunConfig) -> Device:
    """cpu or cuda; auto takes CUDA where an NVIDIA device file is there.

    Raises:
        ConfigError: cuda was asked for without a GPU.
    """
    present = any(Path("/dev").glob("nvidia[0-9]*"))
    if config.cluster.device == "cuda" and not present:
        raise ConfigError("device cuda: this machine shows no NVIDIA GPU; use --device cpu")
    if config.cluster.device == "auto":
        return "cuda" if present else "cpu"
    return config.cluster.device
