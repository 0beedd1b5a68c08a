"""Looking at a gradient that is not used for a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from slime_core.algorithms.losses.reductions import token_weights
from slime_core.algorithms.objective import Objective
from slime_core.batching.select import step_totals
from slime_core.batching.types import TrainBatch
from slime_core.megatron.optimizer import TrainState


def flat_gradient(state: TrainState) -> np.ndarray:
    """float32 [parameters]: the gradient as the backward passes left it, before any clipping."""
    parts = []
    for parameter in state.model.parameters():
        gradient = getattr(parameter, "main_grad", None)
        if gradient is not None:
            parts.append(gradient.detach().float().flatten().cpu())
    return torch.cat(parts).numpy()


def effective_samples(
    objective: Objective, batch: TrainBatch, columns: Mapping[str, torch.Tensor]
) -> float:
    """How many rows of equal weight would carry as much as the rows of a batch of one step do.

    NaN where the loss has no advantages (supervised training), 0 where all of them are 0.
    """
    if "advantages" not in columns:
        return float("nan")
    totals = step_totals(list(batch.steps[0]), batch.rollout_ids, batch.mask_sums)
    rows = torch.from_numpy(batch.response_rows)
    weights = token_weights(
        objective.reduction,
        rows,
        torch.from_numpy(batch.denominators),
        rollouts=totals.rollouts,
        tokens=totals.tokens,
        constant_length=objective.constant_length,
    )
    trained = torch.from_numpy(batch.loss_mask == 1)
    carried = torch.where(trained, weights * columns["advantages"].cpu().abs(), 0.0).double()
    of_row = torch.zeros(batch.num_rows, dtype=torch.float64).index_add_(0, rows, carried)
    squares = float((of_row**2).sum())
    return float(of_row.sum()) ** 2 / squares if squares else 0.0
