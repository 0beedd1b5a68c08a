"""Jobs of test_postprocess.py, which run inside trainer processes."""

from __future__ import annotations

import copy
import random
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from jobs import trainer

from slime_core.batching.types import TrainBatch
from slime_core.errors import PluginError
from slime_core.plugins.trainer_hooks import POSTPROCESS, load_trainer_hook


def told(
    settings: dict[str, Any], batch: TrainBatch, hooks: dict[str, dict[str, str]]
) -> dict[str, str]:
    """What training with each function ends in, and whether it left traces."""
    said = {}
    kept = copy.deepcopy(batch)
    with trainer(settings) as rank:
        own = rank._trainer
        assert own is not None
        limits, weights = own.settings, own.weights_digest()
        for name, hook in hooks.items():
            short = 0.2 if name == "never_ends" else limits.collective_timeout_s
            own.settings = replace(limits, collective_timeout_s=short)
            _seed()
            try:
                loaded = load_trainer_hook(POSTPROCESS, hook[POSTPROCESS])
                own.hooks = replace(own.hooks, args=settings["args"], postprocess=loaded)
                own.train(batch, 0)
                said[name] = "nothing"
            except PluginError as error:
                said[name] = str(error)
        drawn = (random.random(), np.random.rand())
        _seed()
        same = all(
            np.array_equal(getattr(batch, field.name), getattr(kept, field.name))
            for field in fields(batch)
            if isinstance(getattr(batch, field.name), np.ndarray)
        )
        same = same and batch.metadata == kept.metadata and own.weights_digest() == weights
        if same and drawn == (random.random(), np.random.rand()):
            said["after"] = "the batch, the random state and the weights are as before"
    return said


def told_on_rank(
    rank: int, port: int, settings: dict[str, Any], batch: TrainBatch, hook: dict[str, str]
) -> str:
    """What one of two ranks is told."""
    own = {"rank": rank, "local_rank": rank, "world_size": 2, "master_port": port}
    return told(settings | own, batch, {"it": hook})["it"]


def _seed() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
