"""The whole objective of a micro-batch: policy loss, corrections, entropy, KL, and their metrics.

loss = sum over tokens of weight * (c * policy loss - entropy_coef * H + kl_loss_coef * KL), c the
off-policy weight (0 for tokens that were rejected). Weights hold global counts (`reductions`), so
losses and metrics of micro-batches and ranks simply add up to those of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_core.algorithms.corrections import Correction, Tokens, opsm_mask
from slime_core.algorithms.kl import KLType, kl_estimate, unbiased_ratio
from slime_core.algorithms.losses.reductions import ReductionMode, token_weights, weighted_sum
from slime_core.algorithms.losses.types import PolicyInputs, PolicyOptions
from slime_core.algorithms.masking import masked
from slime_core.algorithms.mismatch import mismatch_metrics
from slime_core.algorithms.registry import PolicyLoss
from slime_core.errors import ConfigError


@dataclass(frozen=True)
class Objective:
    """What is minimised.

    Attributes:
        policy_loss: one of `registry.POLICY_LOSSES`, or a function of the same signature.
        options: its numbers.
        reduction: how tokens are weighted.
        constant_length: tokens, for the reduction of that name.
        entropy_coef: 0 leaves the entropy a metric without gradient.
        kl_loss_coef: None leaves the KL to the reference out altogether; 0 makes it a metric.
        kl_loss_type: see `kl`.
        use_unbiased_kl: weigh the KL by the importance ratio.
        correction: off-policy weights from trainer and engine log-probs, for example
            `partial(importance_weights, mode="clip", high=2.0)`; None for no correction.
        opsm_delta: off-policy sequence masking; None for none.
        mismatch_metrics: also report mis_*.
        custom_correction: takes the place of `correction`: policy loss [P] and inputs -> policy
            loss [P], the tokens that stay (bool [P]), and metrics by token.
        reducer: takes the place of the reduction for the policy loss: values [P] and mask [P] ->
            their sum over rollouts (with reduction token_mean over tokens); the step's count
            divides it.
    """

    policy_loss: PolicyLoss
    options: PolicyOptions
    reduction: ReductionMode = "sample_mean"
    constant_length: int | None = None
    entropy_coef: float = 0.0
    kl_loss_coef: float | None = None
    kl_loss_type: KLType = "k1"
    use_unbiased_kl: bool = False
    correction: Callable[[Tokens], Correction] | None = None
    opsm_delta: float | None = None
    mismatch_metrics: bool = False
    custom_correction: (
        Callable[[Tensor, ObjectiveInputs], tuple[Tensor, Tensor, dict[str, Tensor]]] | None
    ) = None
    reducer: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class ObjectiveInputs:
    """P tokens of the k rows of a micro-batch, and the counts of the whole step.

    Attributes:
        log_probs: [P] with gradient.
        entropy: [P] with gradient.
        old_log_probs: [P]; the ratio refers to them.
        advantages: [P]
        mask: bool [P]
        rows: int64 [P]
        denominators: float64 [k], see TrainBatch.
        rollouts, tokens, trained_rollouts: counts of the step, over all ranks
            (`batching.select.step_totals`).
        rollout_log_probs: [P] of the engine, or None.
        ref_log_probs: [P] of the reference, or None.
        train_log_probs: [P] of the trainer, to be compared with the engine's; None takes
            old_log_probs, of which they differ where those are the engine's own.
        weight_scale: [P] what the correction's weights are multiplied by, or None.
    """

    log_probs: Tensor
    entropy: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    rows: Tensor
    denominators: Tensor
    rollouts: int
    tokens: int
    trained_rollouts: int
    rollout_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    train_log_probs: Tensor | None = None
    weight_scale: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.denominators)


@dataclass(frozen=True)
class ObjectiveResult:
    """loss: scalar with gradient. metrics: scalars without; both add up over micro-batches."""

    loss: Tensor
    metrics: dict[str, Tensor]


def evaluate(objective: Objective, x: ObjectiveInputs) -> ObjectiveResult:
    """This micro-batch's part of the step's loss and metrics.

    Metrics other than the losses are means over trained tokens (token_mean) or over rollouts that
    have any: a rollout that is not trained counts as 0 in the loss, but has no entropy to report.

    Raises:
        ConfigError: log-probs are missing that the objective needs.
    """
    for_loss, for_metrics = _weights(objective, x)
    pg_values, token_metrics = _policy_part(objective, x)
    pg_loss = loss = _policy_loss(objective, x, pg_values, for_loss)
    metrics = {"pg_loss": pg_loss}
    token_metrics["entropy_loss"] = x.entropy
    if objective.entropy_coef:
        loss = loss - objective.entropy_coef * weighted_sum(x.entropy, x.mask, for_loss)
    if objective.kl_loss_coef is not None:
        token_metrics["kl_loss"] = kl = _kl_part(objective, x)
        if objective.kl_loss_coef:
            loss = loss + objective.kl_loss_coef * weighted_sum(kl, x.mask, for_loss)
    metrics["loss"] = loss
    with torch.no_grad():
        for name, values in token_metrics.items():
            metrics[name] = weighted_sum(values, x.mask, for_metrics)
    return ObjectiveResult(loss, {name: value.detach() for name, value in metrics.items()})


def _weights(objective: Objective, x: ObjectiveInputs) -> tuple[Tensor, Tensor]:
    """Token weights of the loss and of metrics, [P] each."""
    for_loss = token_weights(
        objective.reduction,
        x.rows,
        x.denominators,
        rollouts=x.rollouts,
        tokens=x.tokens,
        constant_length=objective.constant_length,
    )
    for_metrics = token_weights(
        "token_mean" if objective.reduction == "token_mean" else "sample_mean",
        x.rows,
        x.denominators,
        rollouts=x.trained_rollouts,
        tokens=x.tokens,
    )
    return for_loss, for_metrics


def _policy_loss(
    objective: Objective, x: ObjectiveInputs, values: Tensor, weights: Tensor
) -> Tensor:
    if objective.reducer is None:
        return weighted_sum(values, x.mask, weights)
    count = x.tokens if objective.reduction == "token_mean" else x.rollouts
    return objective.reducer(values, x.mask) / max(count, 1)


def _policy_part(objective: Objective, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Corrected policy loss [P] and per-token metrics."""
    inputs = PolicyInputs(x.log_probs, x.old_log_probs, x.advantages, x.mask, x.rows, x.num_rows)
    policy = objective.policy_loss(inputs, objective.options)
    values, metrics = policy.values, dict(policy.metrics)
    if x.rollout_log_probs is not None:
        train = x.old_log_probs if x.train_log_probs is None else x.train_log_probs
        pair = (train, x.rollout_log_probs, x.mask, x.rows, x.num_rows)
        tokens = Tokens.of(*pair)
        metrics["train_rollout_logprob_abs_diff"] = tokens.log_ratio.abs()
        if objective.mismatch_metrics:
            metrics |= mismatch_metrics(*pair)
        if objective.correction is not None:
            correction = objective.correction(tokens)
            values = masked(values, x.mask) * masked(correction.weights, x.mask)
            metrics |= correction.metrics
            if x.weight_scale is not None:
                values = values * masked(x.weight_scale.to(values.dtype), x.mask)
                metrics["tis_scale"] = x.weight_scale
        if objective.custom_correction is not None:
            values, kept, own = objective.custom_correction(masked(values, x.mask), x)
            values = masked(values, kept)
            metrics |= own
    elif objective.correction or objective.custom_correction or objective.mismatch_metrics:
        raise ConfigError("off-policy corrections and mismatch metrics need rollout log-probs")
    if objective.opsm_delta is not None:
        kept = opsm_mask(
            x.log_probs,
            x.old_log_probs,
            x.advantages,
            x.mask,
            x.rows,
            x.num_rows,
            objective.opsm_delta,
        )
        values = masked(values, kept)
        metrics["opsm_clipfrac"] = (~kept).to(values.dtype)
    return values, metrics


def _kl_part(objective: Objective, x: ObjectiveInputs) -> Tensor:
    if x.ref_log_probs is None:
        raise ConfigError("the KL loss needs log-probs of the reference: set --ref-load")
    log_probs = x.log_probs if objective.kl_loss_coef else x.log_probs.detach()
    ratio = None
    if objective.use_unbiased_kl:
        ratio = unbiased_ratio(log_probs, x.old_log_probs, x.mask)
    return kl_estimate(log_probs, x.ref_log_probs, x.mask, objective.kl_loss_type, ratio)
