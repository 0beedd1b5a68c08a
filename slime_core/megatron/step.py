"""The gradients of one optimizer step, and the metrics that come with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from slime_core.algorithms.log_probs import log_probs_and_entropy
from slime_core.algorithms.losses.reductions import token_weights
from slime_core.algorithms.masking import masked
from slime_core.algorithms.objective import Objective, ObjectiveInputs, evaluate
from slime_core.batching.select import StepTotals, step_totals
from slime_core.batching.types import TrainBatch
from slime_core.errors import TrainerError
from slime_core.megatron import parallel
from slime_core.megatron.hooks import custom_loss, with_hooks
from slime_core.megatron.logprobs import log_probs_of_rows
from slime_core.megatron.optimizer import (
    TrainState,
    read_gradients,
    take_step,
    zero_gradients,
)
from slime_core.megatron.passes import MicroBatch, Passes, Report
from slime_core.plugins.trainer_hooks import TrainerHooks

LARGEST = "train_rollout_logprob_abs_diff_max"
COLUMN_MEANS = {
    "rollout": "rollout/rollout_log_probs",
    "advantages": "rollout/advantages",
    "ref": "rollout/ref_log_probs",
    "kl": "rollout/kl",
    "teacher": "rollout/teacher_log_probs",
}


@dataclass(frozen=True)
class Gradients:
    """A step that is ready to be taken; no weight has changed yet.

    Attributes:
        state: whose gradients.
        metrics: of the whole step, known to every rank.
        grad_norm: before clipping.
        finite: False where the loss or a gradient is NaN or Inf.
        lr: learning rate of the step.
        tokens: trained tokens of the step.
        micro_batches: of this rank.
        non_finite_rows: rows of the micro-batches whose loss is NaN or Inf.
    """

    state: TrainState
    metrics: dict[str, float]
    grad_norm: float
    finite: bool
    lr: float
    tokens: int
    micro_batches: int
    non_finite_rows: list[int]

    def take(self) -> None:
        """Clips and updates the weights."""
        take_step(self.state, self.grad_norm)


class PolicySteps:
    """What the policy's model computes in an iteration."""

    def __init__(self, passes: Passes, hooks: TrainerHooks | None = None) -> None:
        self.passes = passes
        self.hooks = hooks or TrainerHooks()

    def gradients(
        self,
        objective: Objective,
        batch: TrainBatch,
        rows: Sequence[int],
        columns: Mapping[str, torch.Tensor],
    ) -> Gradients:
        """Forward and backward of one optimizer step. A collective.

        Args:
            objective: what is minimised.
            batch: the whole batch of the iteration.
            rows: rows of this step, all ranks together.
            columns: flat columns over the batch's response tokens, [sum R] each: `advantages`,
                `rollout` (log-probs of the engine) and, where there are any, `old` (log-probs the
                ratio refers to; without it the current ones), `train` (the trainer's own old
                log-probs where `old` are the engine's) and `ref` (of the reference).
        """
        totals = step_totals(rows, batch.rollout_ids, batch.mask_sums)
        correct = _correct(batch, rows)
        if correct is not None:
            columns = {**columns, "correct": torch.from_numpy(correct).to(self.passes.device)}
        loss = partial(self._loss, objective, totals, batch)
        whole = "response" if self.hooks.read_all_tokens else "trained"
        return collect(self.passes, batch, rows, columns, totals, loss, whole)

    def log_probs(
        self, batch: TrainBatch, rows: Sequence[int], *, old_policy: bool = False
    ) -> torch.Tensor:
        """Log-probs of all trained response tokens of some rows, with the present weights.

        float32 [sum R], see `Passes.read`. A collective.
        """
        return self.passes.read(
            batch,
            rows,
            lambda micro, hidden: self._read(micro, hidden)[0],
            old_policy=old_policy,
        )

    def sequence_log_probs(self, tokens: Sequence[int]) -> list[float]:
        """log p of tokens[1:] given what stands before each, at temperature 1. A collective."""
        values = self.passes.read_sequence(
            tokens, lambda micro, hidden: self._read(micro, hidden, temperature=1.0)[0]
        )
        return values.tolist()

    def _read(
        self, micro: MicroBatch, hidden: torch.Tensor, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies, float32 [P] each."""
        settings = self.passes.settings
        pair = log_probs_of_rows(
            self.passes.state.model,
            hidden,
            micro.own_targets,
            vocab_size=self.passes.shape.vocab_size,
            temperature=temperature or settings.rollout_temperature,
            chunk_tokens=settings.logits_chunk(self.passes.shape.padded_vocab_size),
        )
        if micro.share is None:
            return pair
        log_probs, entropy = micro.whole(torch.stack(pair, -1)).unbind(-1)
        return log_probs, entropy

    def _loss(
        self,
        objective: Objective,
        totals: StepTotals,
        batch: TrainBatch,
        micro: MicroBatch,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, Report]:
        """This micro-batch's part of the step's loss, and its part of every metric."""
        if self.hooks.loss is not None:
            return self._custom_loss(objective, totals, batch, micro, hidden)
        log_probs, entropy = self._read(micro, hidden)
        columns = micro.columns
        current = log_probs.detach()
        old = columns.get("old", current)
        train = old
        if self.passes.settings.algorithm.use_rollout_logprobs:  # `old` are the engine's
            train = columns.get("train", current)
        result = evaluate(
            with_hooks(objective, self.hooks, batch, micro),
            ObjectiveInputs(
                log_probs=log_probs,
                entropy=entropy,
                old_log_probs=old,
                advantages=columns.get("advantages", torch.zeros_like(current)),
                mask=micro.mask,
                rows=micro.rows,
                denominators=micro.denominators,
                rollouts=totals.rollouts,
                tokens=totals.tokens,
                trained_rollouts=totals.trained_rollouts,
                rollout_log_probs=columns.get("rollout"),
                ref_log_probs=columns.get("ref"),
                train_log_probs=train,
                weight_scale=columns.get("weight_scale"),
            ),
        )
        report = {name: value.double() for name, value in result.metrics.items()}
        return result.loss, report | _means(micro, totals, entropy, current, old, train)

    def _custom_loss(
        self,
        objective: Objective,
        totals: StepTotals,
        batch: TrainBatch,
        micro: MicroBatch,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, Report]:
        """The same by the user's function, which sees logits of all response tokens at once."""
        logits = micro.whole(self.passes.state.model.head(hidden))
        logits = logits[:, : self.passes.shape.vocab_size]
        log_probs, entropy = log_probs_and_entropy(
            logits, micro.targets, self.passes.settings.rollout_temperature
        )
        if not micro.row_ids:  # padding, run for the collectives alone
            return log_probs.sum() * 0.0, {"loss": log_probs.detach().sum() * 0.0}
        weights = token_weights(
            objective.reduction,
            micro.rows,
            micro.denominators,
            rollouts=totals.rollouts,
            tokens=totals.tokens,
            constant_length=objective.constant_length,
        )
        current = log_probs.detach()
        old = micro.columns.get("old", current)
        columns = {**micro.columns, "old": old, "current_log_probs": log_probs, "entropy": entropy}
        loss, metrics = custom_loss(self.hooks, batch, micro, logits, columns, weights)
        report = {**metrics, "loss": loss.detach()}
        means = _means(micro, totals, entropy, current, old, old)
        return loss, {name: value.double() for name, value in report.items()} | means


def _means(
    micro: MicroBatch,
    totals: StepTotals,
    entropy: torch.Tensor,
    current: torch.Tensor,
    old: torch.Tensor,
    train: torch.Tensor,
) -> Report:
    """Parts of means over tokens: log-probs, entropy and what came from them; and the largest gap
    to the engine.

    Args:
        entropy: [P]
        current, old, train: log-probs [P]: of now, those the ratio refers to, and the trainer's
            before the iteration.
    """
    columns = micro.columns
    means = {"rollout/log_probs": current, "rollout/entropy": entropy.detach()}
    means |= {metric: columns[name] for name, metric in COLUMN_MEANS.items() if name in columns}
    if "correct" in columns:
        means["rollout/correct_entropy"] = entropy.detach() * columns["correct"]
    if "teacher" in columns:
        means["rollout/opd_reverse_kl"] = old - columns["teacher"]
    report = token_means(means, micro.mask, totals)
    if "rollout" in columns:
        gap = masked(train - columns["rollout"], micro.mask).abs()
        report[LARGEST] = gap.max().double() if gap.numel() else report["rollout/log_probs"] * 0
    return report


def _correct(batch: TrainBatch, rows: Sequence[int]) -> np.ndarray | None:
    """float32 [sum R]: weights that make a mean over the step's trained tokens one over those of
    its correct responses (raw reward 1); None where it has none."""
    index = np.asarray(rows, dtype=np.int64)
    right = np.zeros(batch.num_rows, dtype=np.float32)
    right[index] = batch.raw_rewards[index] == 1
    trained = batch.mask_sums
    count = float((right * trained).sum())
    if not count:
        return None
    return (right * (trained[index].sum() / count)).astype(np.float32)[batch.response_rows]


def collect(
    passes: Passes,
    batch: TrainBatch,
    rows: Sequence[int],
    columns: Mapping[str, torch.Tensor],
    totals: StepTotals,
    loss: partial[tuple[torch.Tensor, Report]],
    positions: Literal["trained", "response"] = "trained",
) -> Gradients:
    """Runs a step's micro-batches and gathers gradients and metrics. A collective."""
    state = passes.state
    zero_gradients(state)
    lr = state.lr
    outputs, micro_batches = passes.train(batch, rows, columns, loss, positions)
    metrics = _metrics(passes.device, outputs, by_hooks=positions == "response")
    finite, grad_norm = read_gradients(state)
    return Gradients(
        state=state,
        metrics=metrics,
        grad_norm=grad_norm,
        finite=finite and math.isfinite(metrics["loss"]),
        lr=lr,
        tokens=totals.tokens,
        micro_batches=micro_batches,
        non_finite_rows=_non_finite_rows(metrics, outputs),
    )


def token_means(
    values: Mapping[str, torch.Tensor], mask: torch.Tensor, totals: StepTotals
) -> Report:
    """Parts of means over the step's trained tokens."""
    count = max(totals.tokens, 1)
    return {name: masked(value, mask).sum().double() / count for name, value in values.items()}


def _metrics(
    device: torch.device, outputs: list[tuple[MicroBatch, Report]], *, by_hooks: bool
) -> dict[str, float]:
    """Sums over micro-batches and data-parallel ranks, known to every rank afterwards.

    Args:
        by_hooks: functions of the user's report numbers, of which a micro-batch of padding and a
            rank that has no other know nothing.
    """
    reports = [report for micro, report in outputs if micro.row_ids or not by_hooks]
    own = sorted(reports[0]) if reports else []
    names: list[str] = parallel.object_from_last_stage(own)
    if by_hooks:
        names = max(parallel.gather_objects(names), key=len)
    summed = [name for name in names if name != LARGEST]
    sums = torch.zeros(len(summed), dtype=torch.float64, device=device)
    largest = torch.zeros(1, dtype=torch.float64, device=device)
    for report in reports:
        if sorted(report) != names:
            raise TrainerError(
                "micro-batches report different numbers, so they cannot be added up: "
                f"{', '.join(sorted(set(report) ^ set(names)))}"
            )
        sums += torch.stack([report[name] for name in summed])
        if LARGEST in report:
            largest = torch.maximum(largest, report[LARGEST].reshape(1))
    parallel.sum_over_data_parallel(sums)
    parallel.max_over_data_parallel(largest)
    values = parallel.from_last_stage(torch.cat([sums, largest])).tolist()
    found = dict(zip([*summed, LARGEST], values, strict=True))
    return {name: found[name] for name in names}


def _non_finite_rows(
    metrics: dict[str, float], outputs: list[tuple[MicroBatch, Report]]
) -> list[int]:
    """Rows of the micro-batches, on all ranks, whose loss is NaN or Inf."""
    if math.isfinite(metrics["loss"]):
        return []
    own = [
        row
        for micro, report in outputs
        if not math.isfinite(float(report["loss"]))
        for row in micro.row_ids
    ]
    return sorted({row for rows in parallel.gather_objects(own) for row in rows})
