"""From sealed rewards to the advantage of each token, for every estimator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_core.algorithms.advantages import tokens
from slime_core.algorithms.kl import kl_estimate
from slime_core.algorithms.ragged import RowLayout
from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.errors import DataError


@dataclass(frozen=True)
class AdvantageInputs:
    """All response tokens of k rows, flat (P), on one device.

    Attributes:
        rewards: [k] after the estimator's group transform.
        lengths: int64 [k], response tokens of each row, observations included.
        mask: bool [P], trained tokens; all False in a row that no step trains.
        log_probs: [P] of the policy before the iteration, or None where nothing needs them.
        ref_log_probs: [P] of the reference, or None.
        values: [P] of the critic, or None.
        teacher_log_probs: [P] of the teacher, or None.
    """

    rewards: Tensor
    lengths: Tensor
    mask: Tensor
    log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None
    teacher_log_probs: Tensor | None = None


CustomAdvantages = Callable[[AdvantageInputs], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Advantages:
    """Float32 [P] each.

    Attributes:
        advantages: what the policy loss weighs tokens by.
        returns: what the critic learns, or None.
        kl: the KL that shaped token rewards, or None.
    """

    advantages: Tensor
    returns: Tensor | None = None
    kl: Tensor | None = None


@torch.no_grad()
def token_advantages(
    settings: AlgorithmSettings,
    x: AdvantageInputs,
    all_reduce: tokens.AllReduceSum = tokens.alone,
    custom: CustomAdvantages | None = None,
) -> Advantages:
    """The advantage of each token of an iteration, whitened if the settings say so.

    Args:
        settings: estimator and its numbers.
        x: all rows of the iteration.
        all_reduce: for whitening, where each rank passes rows of its own.
        custom: takes the place of the estimator: inputs -> advantages [P], and returns [P] or
            None. Distillation and whitening follow.

    Raises:
        DataError: log-probs or values are missing that the estimator needs.
    """
    layout = RowLayout(x.lengths)
    kind = settings.estimator.token_advantages
    kl = _kl(settings, x) if settings.kl_coef and kind != "broadcast" else None
    returns = None
    if custom is not None:
        found, returns = custom(x)
    elif kind == "discounted":
        found = tokens.reinforce_plus_plus(
            x.rewards, kl, x.mask, layout, kl_coef=settings.kl_coef, gamma=settings.gamma
        )
    elif kind == "kl_shaped":
        found = tokens.kl_shaped(x.rewards, kl, x.mask, layout, kl_coef=settings.kl_coef)
    elif kind == "gae":
        if x.values is None:
            raise DataError(f"the estimator {settings.advantage_estimator} needs critic values")
        shaped = tokens.shaped_rewards(x.rewards, kl, x.mask, layout, settings.kl_coef)
        found, returns = tokens.gae(
            shaped, x.values, x.mask, layout, gamma=settings.gamma, lam=settings.lambd
        )
    else:
        found = tokens.broadcast(x.rewards.double(), layout)
    if settings.use_opd:
        if x.log_probs is None or x.teacher_log_probs is None:
            raise DataError("use_opd needs log-probs of the policy and of the teacher")
        found = tokens.distill(
            found, x.log_probs, x.teacher_log_probs, x.mask, settings.opd_kl_coef
        )
    if settings.normalize_advantages:
        found = tokens.whiten(found, x.mask, all_reduce)
    return Advantages(found.float(), None if returns is None else returns.float(), kl)


def _kl(settings: AlgorithmSettings, x: AdvantageInputs) -> Tensor:
    if x.log_probs is None or x.ref_log_probs is None:
        raise DataError("kl_coef needs log-probs of the policy and of the reference")
    return kl_estimate(x.log_probs, x.ref_log_probs, x.mask, settings.kl_loss_type)
