"""The objective that a trainer's settings ask for, put together from the algorithms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, cast

from slime_core.algorithms.corrections import (
    Correction,
    Rejection,
    Tokens,
    importance_weights,
    reject,
)
from slime_core.algorithms.losses.reductions import ReductionMode
from slime_core.algorithms.losses.types import PolicyOptions
from slime_core.algorithms.objective import Objective
from slime_core.algorithms.registry import get_policy_loss
from slime_core.algorithms.settings import AlgorithmSettings

Scope = Literal["token", "seq_sum", "seq_mean"]
REJECTION_SCOPES: dict[str, Scope] = {
    "token": "token",
    "sequence": "seq_sum",
    "geometric": "seq_mean",
}


def objective_of(settings: AlgorithmSettings) -> Objective:
    """Resolves the names in the settings.

    Raises:
        ConfigError: numbers that contradict each other.
    """
    return Objective(
        policy_loss=get_policy_loss(
            "sft" if settings.loss_type == "sft_loss" else settings.estimator.loss
        ),
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
        correction=_correction(settings),
        opsm_delta=settings.opsm_delta if settings.use_opsm else None,
        mismatch_metrics=settings.get_mismatch_metrics,
    )


def _correction(settings: AlgorithmSettings) -> Callable[[Tokens], Correction] | None:
    """Weights and rejections by the ratio of trainer to engine, None without any."""
    weights = rejection = None
    if settings.use_tis and settings.custom_tis_function_path is None:
        weights = partial(
            importance_weights,
            level=settings.tis_level,
            mode=settings.tis_mode,
            low=settings.tis_clip_low,
            high=settings.tis_clip,
        )
    if settings.use_rs:
        scope = REJECTION_SCOPES[settings.rs_level]
        rejection = Rejection(scope, "k1", settings.rs_upper_bound, settings.rs_lower_bound)
    if rejection is None and settings.rs_veto_threshold is None:
        return weights
    return partial(reject, weights=weights, rejection=rejection, veto=settings.rs_veto_threshold)
