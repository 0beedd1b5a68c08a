"""A smooth gate instead of a clip."""

from __future__ import annotations

import torch

from slime_core.algorithms.losses.types import PolicyInputs, PolicyOptions, TokenLoss
from slime_core.algorithms.masking import bounded_exp


def sapo(inputs: PolicyInputs, options: PolicyOptions) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A.

    "Soft Adaptive Policy Optimization", Gao et al. 2025, arXiv:2511.20347. Slope 1 at r = 1,
    decaying on both sides; a larger tau for negative advantages decays faster.

    Returns:
        Loss [P]; metric ppo_kl.
    """
    ratio = bounded_exp(inputs.log_ratio)
    tau = torch.where(
        inputs.advantages > 0,
        torch.full_like(ratio, options.sapo_tau_pos),
        torch.full_like(ratio, options.sapo_tau_neg),
    )
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return TokenLoss(-gate * inputs.advantages, {"ppo_kl": -inputs.log_ratio.detach()})
