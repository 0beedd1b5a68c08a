"""GRPO: rewards relative to the group (numpy, float64: the result is sealed in batch.json)."""

from __future__ import annotations

import numpy as np

from slime_core.algorithms.advantages.groups import Groups

STD_EPS = 1e-6


def grpo(groups: Groups, std_normalization: bool = True) -> np.ndarray:
    """(r - mean) / (std + 1e-6) within each group, unbiased std; a group of one gets 0.

    Shao et al. 2024, arXiv:2402.03300. Without the division it is Dr.GRPO's advantage.

    Args:
        groups: rewards and who belongs together. Groups may be unequal; each stands on its own.
        std_normalization: False leaves out the division (`--disable-grpo-std-normalization`).

    Returns:
        float64 [n], the same for all response tokens of a row.
    """
    centred = groups.rewards - groups.means[groups.place]
    if std_normalization:
        centred = centred / (groups.stds[groups.place] + STD_EPS)
    return np.where(groups.constant[groups.place], 0.0, centred)


def dr_grpo(groups: Groups) -> np.ndarray:
    """r - group mean, no std. Liu et al. 2025, arXiv:2503.20783 (loss: constant_length)."""
    return grpo(groups, std_normalization=False)
