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

Scope = Literal["token", "seq_sum", "seq_mean", "seq_max"]
REJECTION_SCOPES: dict[str, Scope] = {
    "token": "token",
    "sequence": "seq_sum",
    "geometric": "seq_mean",
    "max": "seq_max",
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
            ipo_threshold=settings.ipo_threshold,
            ipo_kl_tau=settings.ipo_kl_tau,
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
    weights, rejection = weights_of(settings), None
    if settings.use_rs:
        scope = REJECTION_SCOPES[settings.rs_level]
        rejection = Rejection(
            scope, settings.rs_estimator, settings.rs_upper_bound, settings.rs_lower_bound
        )
    if rejection is None and settings.rs_veto_threshold is None:
        return weights
    return partial(reject, weights=weights, rejection=rejection, veto=settings.rs_veto_threshold)


def weights_of(settings: AlgorithmSettings) -> Callable[[Tokens], Correction] | None:
    """The bounded weights of use_tis, None without it or with a function of the user's."""
    if not settings.use_tis or settings.custom_tis_function_path is not None:
        return None
    return partial(
        importance_weights,
        level=settings.tis_level,
        mode=settings.tis_mode,
        low=settings.tis_clip_low,
        high=settings.tis_clip,
    )
