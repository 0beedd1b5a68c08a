"""What a trainer keeps in memory, looked at inside trainer processes (see jobs.py)."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

from jobs import trainer

from slime_core.batching.types import TrainBatch


def model_outlives_its_trainer(settings: dict[str, Any], batch: TrainBatch) -> bool:
    with trainer(settings) as rank:
        rank.train(1, "s0", "s1", "b", batch, 0)
        model = weakref.ref(rank._trainer.state.model)  # type: ignore[union-attr]
    del rank
    gc.collect()
    return model() is not None


def held_places(settings: dict[str, Any]) -> dict[str, list[int]]:
    """Where the parameters lie before, during and after another policy is in use."""
    with trainer(settings) as rank:
        from slime_core.megatron.roles import HeldWeights

        own = rank._trainer
        assert own is not None
        model = own.state.model
        held = HeldWeights(own.state.models, own.shape)

        def places() -> list[int]:
            return [parameter.data_ptr() for parameter in model.parameters()]

        found = {"held": [weights.data_ptr() for weights in held._held.values()]}
        found["before"] = places()
        with held.in_use():
            found["during"] = places()
        found["after"] = places()
        return found


def saved_beside(
    settings: dict[str, Any], before: list[TrainBatch], after: list[TrainBatch], folder: str
) -> dict[str, Any]:
    """Trains, begins a checkpoint, trains on while a thread writes it, makes it final."""
    with trainer(settings) as rank:
        for number, batch in enumerate([*before, *after]):
            if number == len(before):
                rank.begin_save(folder)
            rank.train(1, f"s{number}", f"s{number + 1}", "b", batch, number)
        early = Path(folder).exists()
        while not rank.save_written():
            time.sleep(0.01)
        rank.finish_save()
        return {"early": early, "busy": rank.status()["busy"]}
