"""What runs inside trainer processes about routes."""

from __future__ import annotations

from typing import Any

import numpy as np
from jobs import trainer

from slime_core.batching.types import TrainBatch


def choices(settings: dict[str, Any], batch: TrainBatch, places: list[int]) -> list[np.ndarray]:
    """[tokens, k] of each layer, for a micro-batch of the tokens at `places` in the batch. The
    routers themselves would take the first experts everywhere."""
    import torch

    from slime_core.megatron.layer_spec import Router

    found = []
    with trainer(settings) as rank:
        own: Any = rank._trainer
        routes, (chunk,) = own.policy.passes.routes, own.state.chunks
        routes.take_from_engine(batch)
        scores = torch.arange(own.shape.num_experts, 0.0, -1).expand(len(places), -1)
        for around in (routes.reading, routes.training):
            with around(batch), torch.no_grad():
                routes.begin(chunk, torch.tensor(places))
                for module in chunk.modules():
                    if isinstance(module, Router):
                        _, chosen = module.router_replay.get_replay_topk(  # type: ignore[union-attr]
                            scores, 2, None, None, lambda scores, k, *_: scores.topk(k, -1)
                        )
                        found.append(chosen.numpy())
    return found
