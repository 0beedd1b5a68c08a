"""Which device a run computes on. Imports neither torch nor Ray."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Literal

from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError

Device = Literal["cpu", "cuda"]


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES, where it is set, leaves visible.

    Args:
        devices: folder of the system's device files.
    """
    there = len(list(devices.glob("nvidia[0-9]*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return there
    names = [name.strip() for name in chosen.split(",")]
    # CUDA reads the list up to its first entry that names no device.
    named = list(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    return min(there, len(named))


def resolve_device(config: RunConfig, devices: Path = Path("/dev")) -> Device:
    """cpu or cuda; auto takes CUDA where a GPU is visible.

    Args:
        devices: folder of the system's device files.

    Raises:
        ConfigError: cuda was asked for without a GPU, or there are fewer GPUs than trainer ranks.
    """
    cluster = config.cluster
    ranks, gpus = cluster.actor_num_gpus_per_node, visible_gpus(devices)
    if cluster.device == "cpu":
        return "cpu"
    if cluster.device == "cuda" and not gpus:
        raise ConfigError("device cuda: this machine shows no NVIDIA GPU; use --device cpu")
    if ranks > max(1, gpus):
        raise ConfigError(
            f"actor_num_gpus_per_node {ranks}: this machine shows {gpus} NVIDIA GPUs and each "
            "trainer rank needs its own; lower it, or train on processes with --device cpu"
        )
    return "cuda" if gpus else "cpu"
