"""Other estimators that turn one reward a rollout into one advantage, by the group's rewards.

All take `Groups` and return float64 [n]. A group whose rewards are all equal, and so also a group
of one rollout, gets 0 unless the docstring says otherwise.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from slime_core.algorithms.advantages.groups import Groups
from slime_core.algorithms.advantages.grpo import STD_EPS
from slime_core.errors import DataError


def raw(groups: Groups) -> np.ndarray:
    """The reward itself: PPO and REINFORCE++ build token advantages from it."""
    return groups.rewards


def group_centred(groups: Groups) -> np.ndarray:
    """r - group mean, no std. REINFORCE++-baseline; whitening over the batch follows.

    Hu et al. 2025, arXiv:2501.03262.
    """
    return _zero_where_constant(groups, groups.rewards - groups.means[groups.place])


def rloo(groups: Groups) -> np.ndarray:
    """r - mean of the other rollouts of the group = n / (n - 1) (r - group mean).

    Ahmadian et al. 2024, arXiv:2402.14740.
    """
    scale = groups.sizes / np.maximum(groups.sizes - 1, 1)
    return group_centred(groups) * scale[groups.place]


def opo(groups: Groups) -> np.ndarray:
    """r - b, b = sum(length r) / sum(length) over the group: the optimal baseline.

    Hao et al. 2025, arXiv:2505.23585. A group without a trained token takes its mean.

    Raises:
        DataError: response_lengths are missing.
    """
    if groups.response_lengths is None:
        raise DataError("the estimator opo needs response lengths")
    lengths = np.bincount(groups.rollout_of_row, weights=groups.response_lengths)
    total = groups.sum_over_group(lengths)
    weighted = groups.sum_over_group(lengths * groups.rollout_rewards)
    baseline = np.where(total > 0, weighted / np.maximum(total, 1), groups.means)
    return _zero_where_constant(groups, groups.rewards - baseline[groups.place])


def gpg(
    groups: Groups, scale: Literal["varied_groups", "nonzero_rewards"] = "varied_groups"
) -> np.ndarray:
    """alpha (r - group mean); alpha makes up for rollouts without a gradient.

    Chu et al. 2025, arXiv:2504.02546: alpha = rollouts / rollouts in groups whose rewards differ.
    `nonzero_rewards` counts rollouts with a reward other than 0 instead, as some frameworks do.
    """
    if scale == "nonzero_rewards":
        active = np.count_nonzero(groups.rollout_rewards)
    else:
        active = np.count_nonzero(~groups.constant[groups.rollout_place])
    return group_centred(groups) * (len(groups.rollout_rewards) / max(int(active), 1))


def remax(groups: Groups) -> np.ndarray:
    """r - reward of the prompt's greedy answer, which the rollout draws beside the samples.

    Li et al. 2023, arXiv:2310.10505. Needs no siblings: a group of one is as good as any.

    Raises:
        DataError: baseline_rewards are missing or not finite.
    """
    if groups.baseline_rewards is None:
        raise DataError("the estimator remax needs the reward of each prompt's greedy answer")
    baseline = np.asarray(groups.baseline_rewards, dtype=np.float64)
    if not np.isfinite(baseline).all():
        row = int(np.argmin(np.isfinite(baseline)))
        raise DataError(
            f"remax: the greedy answer of group {groups.group_ids[row]} has reward {baseline[row]}"
        )
    return groups.rewards - baseline


def max_rl(groups: Groups) -> np.ndarray:
    """(r - group mean) / group mean; 0 where the mean is not above 0.

    Normalising by the success rate follows the log-likelihood of being right ("maximum
    likelihood reinforcement learning", 2026): rare successes weigh more.
    """
    means = groups.means[groups.place]
    safe = np.where(means > 0, means, 1.0)
    return np.where(means > 0, group_centred(groups) / safe, 0.0)


def pass_at_k(groups: Groups, std_normalization: bool = True) -> np.ndarray:
    """The best rollout of a group gets best - second best, all others 0: pass@k with k = n.

    Tang et al. 2025, arXiv:2503.19595. Equal best rewards give 0, for a pass needs one only.

    Args:
        groups: rewards.
        std_normalization: divide by the group's std + 1e-6.
    """
    rewards, place = groups.rollout_rewards, groups.rollout_place
    order = np.lexsort((rewards, place))
    last = np.cumsum(groups.sizes) - 1
    best = order[last]
    second = order[np.maximum(last - 1, 0)]
    gap = np.where(groups.sizes > 1, rewards[best] - rewards[second], 0.0)
    if std_normalization:
        gap = gap / (groups.stds + STD_EPS)
    per_rollout = np.zeros(len(rewards))
    per_rollout[best] = gap
    return per_rollout[groups.rollout_of_row]


def _zero_where_constant(groups: Groups, values: np.ndarray) -> np.ndarray:
    """Equal rewards carry no signal; without this, rounding of the mean would."""
    return np.where(groups.constant[groups.place], 0.0, values)
