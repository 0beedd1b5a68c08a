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


def resolve_device(
    config: RunConfig, devices: Path = Path("/dev"), *, cluster_gpus: int | None = None
) -> Device:
    """cpu or cuda; auto takes CUDA where a GPU is visible.

    Args:
        devices: folder of the system's device files.
        cluster_gpus: where the run is on a Ray cluster that stands already, most GPUs of one of its
            nodes; they count instead.

    Raises:
        ConfigError: cuda was asked for without a GPU, or there are fewer GPUs than trainer ranks.
    """
    cluster = config.cluster
    ranks, gpus, where = cluster.actor_num_gpus_per_node, visible_gpus(devices), "this machine"
    if cluster_gpus is not None:
        gpus, where = cluster_gpus, "a node of the Ray cluster"
    if cluster.device == "cpu":
        return "cpu"
    if cluster.device == "cuda" and not gpus:
        raise ConfigError(f"device cuda: {where} shows no NVIDIA GPU; use --device cpu")
    if ranks > max(1, gpus):
        raise ConfigError(
            f"actor_num_gpus_per_node {ranks}: {where} shows {gpus} NVIDIA GPUs and each "
            "trainer rank needs its own; lower it, or train on processes with --device cpu"
        )
    return "cuda" if gpus else "cpu"
