"""The loss that the settings ask for, put together from the algorithms."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slime_core.algorithms.advantages.registry import get_estimator
from slime_core.algorithms.losses.reductions import ReductionMode, token_weights
from slime_core.algorithms.losses.types import PolicyOptions
from slime_core.algorithms.registry import PolicyLoss, get_policy_loss
from slime_core.errors import ConfigError
from slime_core.megatron.settings import TrainerSettings


@dataclass(frozen=True)
class LossSetup:
    """Which policy loss, with which numbers, reduced how."""

    policy_loss: PolicyLoss
    options: PolicyOptions
    reduction: ReductionMode
    entropy_coef: float

    def weights(
        self, rows: torch.Tensor, denominators: torch.Tensor, *, rollouts: int, tokens: int
    ) -> torch.Tensor:
        """[P] weight of each token; rows int64 [P], denominators float64 [k]."""
        return token_weights(self.reduction, rows, denominators, rollouts=rollouts, tokens=tokens)


def loss_setup(settings: TrainerSettings) -> LossSetup:
    """Resolves the names in the settings.

    Raises:
        ConfigError: an unknown estimator, or one that needs what is not built yet.
    """
    estimator = get_estimator(settings.advantage_estimator)
    if estimator.token_advantages != "broadcast" or estimator.reduction is not None:
        raise ConfigError(
            f"--advantage-estimator {estimator.name} is not supported by the trainer yet"
        )
    return LossSetup(
        policy_loss=get_policy_loss(estimator.loss),
        options=PolicyOptions(
            eps_clip=settings.eps_clip,
            eps_clip_high=settings.eps_clip_high,
            eps_clip_c=settings.eps_clip_c,
        ),
        reduction="token_mean" if settings.calculate_per_token_loss else "sample_mean",
        entropy_coef=settings.entropy_coef,
    )
