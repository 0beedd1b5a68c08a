"""Clipped policy gradient on token ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_core.algorithms.losses.types import PolicyInputs, PolicyOptions, TokenLoss
from slime_core.algorithms.masking import bounded_exp


def clipped_objective(
    log_ratio: Tensor, advantages: Tensor, options: PolicyOptions
) -> tuple[Tensor, Tensor]:
    """The pessimistic clipped loss for given log-ratios.

    r = exp(log_ratio), L = max(-r A, -clip(r, 1 - eps, 1 + eps_high) A); with dual clip and A < 0
    also L = min(L, -c A).

    Args:
        log_ratio: [P], with gradient.
        advantages: [P]

    Returns:
        Loss [P] and the indicator [P] of tokens whose clipped branch is the larger one.
    """
    ratio = bounded_exp(log_ratio)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - options.eps_clip, 1 + options.high) * advantages
    loss = torch.maximum(plain, clipped)
    if options.eps_clip_c is not None:
        capped = torch.minimum(loss, -options.eps_clip_c * advantages)
        loss = torch.where(advantages < 0, capped, loss)
    return loss, (clipped > plain).detach().to(loss.dtype)


def ppo_clip(inputs: PolicyInputs, options: PolicyOptions) -> TokenLoss:
    """PPO's clipped surrogate, with clip-higher (DAPO) and dual clip.

    Schulman et al. 2017, arXiv:1707.06347; clip-higher: Yu et al. 2025, arXiv:2503.14476; dual
    clip: Ye et al. 2020, arXiv:1912.09729.

    Returns:
        Loss [P]; metrics pg_clipfrac and ppo_kl (old - current log-prob).
    """
    loss, clipfrac = clipped_objective(inputs.log_ratio, inputs.advantages, options)
    return TokenLoss(loss, {"pg_clipfrac": clipfrac, "ppo_kl": -inputs.log_ratio.detach()})
