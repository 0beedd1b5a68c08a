"""The objective that a trainer's settings ask for, put together from the algorithms."""

from __future__ import annotations

from functools import partial
from typing import cast

from slime_core.algorithms.corrections import importance_weights
from slime_core.algorithms.losses.reductions import ReductionMode
from slime_core.algorithms.losses.types import PolicyOptions
from slime_core.algorithms.objective import Objective
from slime_core.algorithms.registry import get_policy_loss
from slime_core.algorithms.settings import AlgorithmSettings


def objective_of(settings: AlgorithmSettings) -> Objective:
    """Resolves the names in the settings.

    Raises:
        ConfigError: numbers that contradict each other.
    """
    correction = None
    if settings.use_tis:
        correction = partial(
            importance_weights,
            level=settings.tis_level,
            mode=settings.tis_mode,
            low=settings.tis_clip_low,
            high=settings.tis_clip,
        )
    return Objective(
        policy_loss=get_policy_loss(settings.estimator.loss),
        options=PolicyOptions(
            eps_clip=settings.eps_clip,
            eps_clip_high=settings.eps_clip_high,
            eps_clip_c=settings.eps_clip_c,
            sapo_tau_pos=settings.sapo_tau_pos,
            sapo_tau_neg=settings.sapo_tau_neg,
        ),
        reduction=cast(ReductionMode, settings.reduction),
        constant_length=settings.max_response_len,
        entropy_coef=settings.entropy_coef,
        kl_loss_coef=settings.kl_loss_coef if settings.use_kl_loss else None,
        kl_loss_type=settings.kl_loss_type,
        use_unbiased_kl=settings.use_unbiased_kl,
        correction=correction,
        opsm_delta=settings.opsm_delta if settings.use_opsm else None,
        mismatch_metrics=settings.get_mismatch_metrics,
    )
