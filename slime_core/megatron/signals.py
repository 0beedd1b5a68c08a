"""What an iteration computes before its first optimizer step: log-probs, values, advantages."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch

from slime_core.algorithms.advantages.assemble import AdvantageInputs, token_advantages
from slime_core.algorithms.corrections import Tokens, weight_scale
from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.batching.types import TrainBatch
from slime_core.megatron.critic import CriticSteps
from slime_core.megatron.hooks import custom_advantages
from slime_core.megatron.objective import weights_of
from slime_core.megatron.roles import HeldWeights
from slime_core.megatron.step import PolicySteps
from slime_core.plugins.trainer_hooks import TrainerHooks

Columns = dict[str, torch.Tensor]


def response_columns(
    algorithm: AlgorithmSettings,
    batch: TrainBatch,
    policy: PolicySteps,
    reference: HeldWeights | None = None,
    teacher: HeldWeights | None = None,
    critic: CriticSteps | None = None,
    hooks: TrainerHooks | None = None,
    old_actor: HeldWeights | None = None,
) -> Columns:
    """Flat columns over the batch's response tokens, [sum R] each, the same on every rank.

    Always computed from the present weights, also in a replay. A collective. Each rank holds the
    whole batch and the log-probs of all ranks, so whitening needs no further communication.

    Returns:
        `advantages` and `rollout`, which may be missing where the loss is not a policy's; where
        they are needed `weight_scale` (of the correction), `old`, `train` and `ref` (see
        PolicySteps.gradients), `values` and `returns` (see CriticSteps.gradients), and for
        metrics `kl` (of token rewards) and `teacher`.
    """
    device = policy.passes.device
    rows = [row for step in batch.steps for row in step]
    columns: Columns = {}
    if algorithm.loss_type == "policy_loss" or np.isfinite(batch.rollout_log_probs).any():
        columns["rollout"] = torch.from_numpy(batch.rollout_log_probs).to(device)
    for name, other in (("ref", reference), ("teacher", teacher)):
        if other is not None:
            with other.in_use():
                policy.hooks.reads_log_probs(policy.passes.state.chunks, f"{name}_")
                columns[name] = policy.log_probs(batch, rows)
    if algorithm.use_rollout_logprobs:
        columns["old"] = columns["rollout"]
    if algorithm.needs_old_log_probs(len(batch.steps)):
        name = "train" if algorithm.use_rollout_logprobs else "old"
        with nullcontext() if old_actor is None else old_actor.in_use():
            prefix = "" if old_actor is None else "old_actor_"
            policy.hooks.reads_log_probs(policy.passes.state.chunks, prefix)
            columns[name] = policy.log_probs(batch, rows, old_policy=True)
    if algorithm.tis_batch_normalize:
        columns["weight_scale"] = weight_scales(algorithm, batch, columns)
    if critic is not None:
        columns["values"] = critic.values(batch, rows)
    if algorithm.disable_compute_advantages_and_returns:
        return columns
    made = token_advantages(
        algorithm,
        AdvantageInputs(
            rewards=torch.from_numpy(batch.rewards).to(device),
            lengths=torch.from_numpy(batch.response_lengths).to(device),
            mask=torch.from_numpy(_trained(batch, rows)).to(device),
            log_probs=columns.get("old"),
            ref_log_probs=columns.get("ref"),
            values=columns.get("values"),
            teacher_log_probs=columns.get("teacher"),
        ),
        custom=custom_advantages(hooks or TrainerHooks(), batch, columns),
    )
    columns["advantages"] = made.advantages
    for name, column in (("returns", made.returns), ("kl", made.kl)):
        if column is not None:
            columns[name] = column
    return columns


def weight_scales(
    algorithm: AlgorithmSettings, batch: TrainBatch, columns: Columns
) -> torch.Tensor:
    """float32 [sum R]: what makes the mean weight of the token's optimizer step 1."""
    weights = weights_of(algorithm)
    assert weights is not None
    rollout = columns["rollout"]
    rows = torch.from_numpy(batch.response_rows).to(rollout.device)
    scales = torch.ones_like(rollout)
    for step in batch.steps:
        mask = torch.from_numpy(_trained(batch, list(step))).to(rollout.device)
        tokens = Tokens.of(columns["old"], rollout, mask, rows, batch.num_rows)
        scales[mask] = weight_scale(weights(tokens).weights, mask).float()
    return scales


def _trained(batch: TrainBatch, rows: list[int]) -> np.ndarray:
    """bool [sum R]: trained tokens of the rows that some step trains."""
    chosen = np.zeros(batch.num_rows, dtype=bool)
    chosen[rows] = True
    return (batch.loss_mask == 1) & chosen[batch.response_rows]
