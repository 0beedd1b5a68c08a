"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_core.algorithms.losses.types import TokenLoss
from slime_core.algorithms.masking import masked


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, value_clip: float
) -> TokenLoss:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), without a factor 1/2.

    Schulman et al. 2017, arXiv:1707.06347.

    Args:
        values: [P], with gradient.
        old_values: [P], those the returns were made with.
        returns: [P]
        mask: bool [P]
        value_clip: c, `--value-clip`.

    Returns:
        Loss [P]; metric value_clipfrac.
    """
    values = masked(values, mask)
    old = masked(old_values, mask).detach()
    target = masked(returns, mask).to(values.dtype).detach()
    bounded = torch.minimum(torch.maximum(values, old - value_clip), old + value_clip)
    plain, clipped = (values - target) ** 2, (bounded - target) ** 2
    clipfrac = (clipped > plain).detach().to(values.dtype)
    return TokenLoss(torch.maximum(plain, clipped), {"value_clipfrac": clipfrac})
