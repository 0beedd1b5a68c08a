"""Advantages of single tokens: broadcast, shaped returns, GAE, distillation, whitening.

Columns are flat over *all* response tokens of k rows (`RowLayout`), since returns pass through
observation tokens. No result has a gradient. Sums run in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slime_core.algorithms.masking import masked, row_sums
from slime_core.algorithms.ragged import RowLayout, reverse_discounted_sum
from slime_core.errors import DataError

AllReduceSum = Callable[[Tensor], Tensor]
WHITEN_EPS = 1e-8


def alone(tensor: Tensor) -> Tensor:
    """The all-reduce of a single rank."""
    return tensor


def broadcast(rewards: Tensor, layout: RowLayout) -> Tensor:
    """The row's reward on each of its tokens (GRPO and its kin). [k] -> [P]"""
    return rewards[layout.rows]


def last_trained(mask: Tensor, layout: RowLayout) -> Tensor:
    """bool [P]: the last trained token of each row; none in a row that is not trained."""
    after = reverse_discounted_sum(layout.pad(mask.double()), 1.0)
    return mask & (layout.unpad(after) == 1)


def shaped_rewards(
    rewards: Tensor, kl: Tensor | None, mask: Tensor, layout: RowLayout, kl_coef: float
) -> Tensor:
    """-kl_coef * KL on trained tokens, plus the row's reward on its last trained token.

    The last token of a response may be an observation, which no gradient reaches; so the reward
    goes to the last one that is trained.

    Args:
        rewards: [k]
        kl: [P] or None for no KL.
        mask: bool [P]
        layout: rows of the flat columns.
        kl_coef: `--kl-coef`.

    Returns:
        float64 [P]
    """
    at_end = masked(broadcast(rewards.double(), layout), last_trained(mask, layout))
    return at_end if kl is None else at_end - kl_coef * masked(kl.double(), mask)


def reinforce_plus_plus(
    rewards: Tensor,
    kl: Tensor | None,
    mask: Tensor,
    layout: RowLayout,
    *,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
) -> Tensor:
    """Discounted returns of the shaped rewards: R_t = sum over s >= t of gamma^(s - t) r_s.

    Hu et al. 2025, arXiv:2501.03262. Observation tokens count as steps. Whitening follows.

    Returns:
        float64 [P]; advantages and returns are the same thing here.
    """
    shaped = shaped_rewards(rewards, kl, mask, layout, kl_coef)
    return layout.unpad(reverse_discounted_sum(layout.pad(shaped), gamma))


def kl_shaped(
    rewards: Tensor, kl: Tensor | None, mask: Tensor, layout: RowLayout, *, kl_coef: float = 0.0
) -> Tensor:
    """The row's (group-centred) reward minus kl_coef * KL of the token: REINFORCE++-baseline.

    Hu et al. 2025, arXiv:2501.03262. Whitening follows.

    Returns:
        float64 [P]
    """
    values = broadcast(rewards.double(), layout)
    return values if kl is None else values - kl_coef * masked(kl.double(), mask)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    layout: RowLayout,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the trained tokens of each row.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum over l of (gamma lam)^l delta_{t+l},
    R_t = A_t + V_t; V beyond the end is 0. Schulman et al. 2015, arXiv:1506.02438.

    t runs over trained tokens only: the state after an observation is the next one in which the
    policy acts, so its value is the one to bootstrap from.

    Args:
        token_rewards: [P], for example `shaped_rewards`; outside the mask not used.
        values: [P] of the critic; outside the mask not used.
        mask: bool [P]
        layout: rows of the flat columns.
        gamma: discount.
        lam: lambda.

    Returns:
        advantages and returns, float64 [P], 0 outside the mask.
    """
    counts = row_sums(mask.long(), layout.rows, len(layout.lengths))
    trained = RowLayout(counts)
    value = trained.pad(values[mask].detach().double())
    reward = trained.pad(token_rewards[mask].double())
    following = torch.nn.functional.pad(value, (0, 1))[:, 1:]
    delta = reward + gamma * following - value
    advantage = reverse_discounted_sum(delta, gamma * lam)
    out = torch.zeros(2, len(mask), dtype=torch.float64, device=mask.device)
    out[0, mask] = trained.unpad(advantage)
    out[1, mask] = trained.unpad(advantage + value)
    return out[0], out[1]


def distill(
    advantages: Tensor, student: Tensor, teacher: Tensor, mask: Tensor, coefficient: float
) -> Tensor:
    """On-policy distillation: A - coefficient * (log p_student - log p_teacher), before whitening.

    Lu and Thinking Machines Lab 2025, "On-policy distillation".

    Args:
        advantages: [P]
        student: [P] log-probs, no gradient is taken.
        teacher: [P] log-probs of the same tokens.
        mask: bool [P]
        coefficient: `--opd-kl-coef`.
    """
    gap = masked(student.detach(), mask) - masked(teacher, mask)
    return advantages - coefficient * gap


def whiten(
    values: Tensor,
    mask: Tensor,
    all_reduce: AllReduceSum = alone,
    *,
    shift_mean: bool = True,
) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) with the mean and unbiased variance of *all* trained tokens.

    Args:
        values: [P] of this rank.
        mask: bool [P]
        all_reduce: sums a tensor over all data-parallel (and context-parallel) ranks; called
            twice by every rank, also by one without a trained token.
        shift_mean: False adds the mean back.

    Returns:
        float64 [P]; outside the mask the same map of whatever stood there.

    Raises:
        DataError: no rank has a trained token.
    """
    clean = masked(values.double(), mask)
    count, total = all_reduce(torch.stack([mask.sum().double(), clean.sum()])).tolist()
    if count == 0:
        raise DataError("cannot whiten advantages: no token of the batch is trained")
    mean = total / count
    squares = all_reduce((masked(clean - mean, mask) ** 2).sum()[None]).item()
    scale = (squares / max(count - 1, 1) + WHITEN_EPS) ** -0.5
    whitened = (values.double() - mean) * scale
    return whitened if shift_mean else whitened + mean
