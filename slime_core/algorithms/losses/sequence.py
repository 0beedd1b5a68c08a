"""Losses on sequence ratios. Each token of a row carries its row's loss."""

from __future__ import annotations

import torch

from slime_core.algorithms.losses.ppo import clipped_objective
from slime_core.algorithms.losses.types import PolicyInputs, PolicyOptions, TokenLoss
from slime_core.algorithms.masking import bounded_exp, row_means


def gspo(inputs: PolicyInputs, options: PolicyOptions) -> TokenLoss:
    """PPO clip on the sequence ratio s = exp(mean over trained tokens of log r).

    Zheng et al. 2025, arXiv:2507.18071. The gradient flows through the mean.

    Returns:
        Loss [P]; metrics pg_clipfrac and ppo_kl (both of the sequence).
    """
    mean = row_means(inputs.log_ratio, inputs.mask, inputs.rows, inputs.num_rows)[inputs.rows]
    loss, clipfrac = clipped_objective(mean, inputs.advantages, options)
    return TokenLoss(loss, {"pg_clipfrac": clipfrac, "ppo_kl": -mean.detach()})


def gmpo(inputs: PolicyInputs, options: PolicyOptions) -> TokenLoss:
    """-A exp(mean of clipped log r), clipped in log space on the side that would gain.

    Zhao et al. 2025, arXiv:2507.20673. Token log-ratios are bounded by eps_clip_high for A >= 0
    and by -eps_clip for A < 0 (the paper uses 0.4), then the geometric mean is taken.

    Returns:
        Loss [P]; metrics pg_clipfrac (tokens bounded) and ppo_kl.
    """
    log_ratio, advantages = inputs.log_ratio, inputs.advantages
    bounded = torch.where(
        advantages >= 0,
        log_ratio.clamp(max=options.high),
        log_ratio.clamp(min=-options.eps_clip),
    )
    mean = row_means(bounded, inputs.mask, inputs.rows, inputs.num_rows)
    advantage = row_means(advantages, inputs.mask, inputs.rows, inputs.num_rows)
    loss = (-advantage * bounded_exp(mean))[inputs.rows]
    clipped = (bounded != log_ratio).detach().to(loss.dtype)
    return TokenLoss(loss, {"pg_clipfrac": clipped, "ppo_kl": -log_ratio.detach()})
