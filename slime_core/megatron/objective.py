"""The objective that a trainer's settings ask for, put together from the algorithms."""

from __future__ import annotations

from slime_core.algorithms.advantages.registry import get_estimator
from slime_core.algorithms.losses.types import PolicyOptions
from slime_core.algorithms.objective import Objective
from slime_core.algorithms.registry import get_policy_loss
from slime_core.errors import ConfigError
from slime_core.megatron.settings import TrainerSettings


def objective_of(settings: TrainerSettings) -> Objective:
    """Resolves the names in the settings.

    Raises:
        ConfigError: an unknown estimator, or one that needs what is not built yet.
    """
    estimator = get_estimator(settings.advantage_estimator)
    if estimator.token_advantages != "broadcast" or estimator.reduction is not None:
        raise ConfigError(
            f"--advantage-estimator {estimator.name} is not supported by the trainer yet"
        )
    return Objective(
        policy_loss=get_policy_loss(estimator.loss),
        options=PolicyOptions(
            eps_clip=settings.eps_clip,
            eps_clip_high=settings.eps_clip_high,
            eps_clip_c=settings.eps_clip_c,
        ),
        reduction="token_mean" if settings.calculate_per_token_loss else "sample_mean",
        entropy_coef=settings.entropy_coef,
    )
