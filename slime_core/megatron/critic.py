"""The critic of PPO: a model of its own with a value head, an optimizer and a learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from slime_core.algorithms.losses.reductions import token_weights, weighted_sum
from slime_core.algorithms.losses.value import value_loss
from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.batching.select import StepTotals, step_totals
from slime_core.batching.types import TrainBatch
from slime_core.megatron.arguments import ResolvedOptions
from slime_core.megatron.foreign import read_weights
from slime_core.megatron.model import ValueModel, build_model
from slime_core.megatron.optimizer import build_train_state
from slime_core.megatron.passes import MicroBatch, Passes, Report
from slime_core.megatron.settings import TrainerSettings
from slime_core.megatron.step import Gradients, collect, token_means
from slime_core.weights.tables import ModelShape


class CriticSteps:
    """What the critic's model computes in an iteration."""

    def __init__(self, passes: Passes, algorithm: AlgorithmSettings) -> None:
        self.passes = passes
        self.algorithm = algorithm

    def values(self, batch: TrainBatch, rows: Sequence[int]) -> torch.Tensor:
        """The value before each trained response token, float32 [sum R]. A collective.

        Temperature plays no part in values.
        """
        return self.passes.read(batch, rows, self._values)

    def gradients(
        self, batch: TrainBatch, rows: Sequence[int], columns: Mapping[str, torch.Tensor]
    ) -> Gradients:
        """Forward and backward of one optimizer step. A collective.

        Args:
            columns: `values` before the iteration and `returns`, [sum R] each.
        """
        totals = step_totals(rows, batch.rollout_ids, batch.mask_sums)
        return collect(self.passes, batch, rows, columns, totals, partial(self._loss, totals))

    def _values(self, micro: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        return micro.whole(self.passes.state.model.head(hidden))

    def _loss(
        self, totals: StepTotals, micro: MicroBatch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, Report]:
        old, returns = micro.columns["values"], micro.columns["returns"]
        trained = micro.mask
        values = self._values(micro, hidden)
        tokens = value_loss(values, old, returns, trained, self.algorithm.value_clip)
        per_token = self.algorithm.calculate_per_token_loss
        weights = token_weights(
            "token_mean" if per_token else "sample_mean",
            micro.rows,
            micro.denominators,
            rollouts=totals.rollouts,
            tokens=totals.tokens,
        )
        loss = weighted_sum(tokens.values, trained, weights)
        means = {**tokens.metrics, "rollout/values": old, "rollout/returns": returns}
        return loss, {"loss": loss.detach().double()} | token_means(means, trained, totals)


def build_critic(
    settings: TrainerSettings, shape: ModelShape, options: ResolvedOptions
) -> CriticSteps:
    """A critic whose decoder begins at the policy's checkpoint."""
    lr = settings.algorithm.critic_lr
    own = settings if lr is None else replace(settings, lr=lr, min_lr=min(settings.min_lr, lr))
    chunks, padded = build_model(own, shape, options, ValueModel)
    if own.megatron_load is not None:
        read_weights(chunks, own.megatron_load)
    state = build_train_state(chunks, own, options)
    return CriticSteps(Passes(own, padded, state), settings.algorithm)


def as_metrics(gradients: Gradients) -> dict[str, float]:
    """The critic's numbers beside those of the policy's step."""
    named = {("value_loss" if n == "loss" else n): v for n, v in gradients.metrics.items()}
    return {**named, "critic_grad_norm": gradients.grad_norm, "critic_lr": gradients.lr}
