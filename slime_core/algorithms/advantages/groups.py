"""Rewards with the group each belongs to, by id and never by position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slime_core.errors import DataError


@dataclass(frozen=True)
class Groups:
    """Rewards of n rows and their groups.

    Statistics are over rollouts: rows fanned out of one rollout enter once, with their mean, so
    a rollout that was split into many rows does not outweigh its siblings.

    Attributes:
        rewards: [n], finite.
        group_ids: [n], any values that can be compared for equality.
        rollout_ids: [n] or None where each row is a rollout of its own.
        response_lengths: [n] trained tokens; used by OPO only.
        baseline_rewards: [n] reward of the group's greedy answer; used by ReMax only.

    Raises:
        DataError: lengths differ or a reward is not finite.
    """

    rewards: np.ndarray
    group_ids: np.ndarray
    rollout_ids: np.ndarray | None = None
    response_lengths: np.ndarray | None = None
    baseline_rewards: np.ndarray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rewards", np.asarray(self.rewards, dtype=np.float64))
        for name in ("group_ids", "rollout_ids", "response_lengths", "baseline_rewards"):
            column = getattr(self, name)
            if column is None:
                continue
            column = np.asarray(column)
            object.__setattr__(self, name, column)
            if column.shape != self.rewards.shape:
                raise DataError(f"{name} has {len(column)} values for {len(self.rewards)} rewards")
        bad = np.flatnonzero(~np.isfinite(self.rewards))
        if bad.size:
            raise DataError(
                f"the reward of row {bad[0]} (group {self.group_ids[bad[0]]}) is "
                f"{self.rewards[bad[0]]}: score it or drop its group"
            )

    @cached_property
    def place(self) -> np.ndarray:
        """int64 [n]: 0..g-1, the group of each row."""
        return np.unique(self.group_ids, return_inverse=True)[1].reshape(-1)

    @cached_property
    def _rollouts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reward and group of each of the R rollouts, and the rollout of each row."""
        n = len(self.rewards)
        if self.rollout_ids is None:
            return self.rewards, self.place, np.arange(n)
        _, first, of_row = np.unique(self.rollout_ids, return_index=True, return_inverse=True)
        of_row = of_row.reshape(-1)
        if np.any(self.place[first][of_row] != self.place):
            raise DataError("rows of one rollout belong to different groups")
        sums = np.bincount(of_row, weights=self.rewards)
        return sums / np.bincount(of_row), self.place[first], of_row

    @property
    def rollout_rewards(self) -> np.ndarray:
        """float64 [R]: one reward a rollout."""
        return self._rollouts[0]

    @property
    def rollout_place(self) -> np.ndarray:
        """int64 [R]: the group of each rollout."""
        return self._rollouts[1]

    @property
    def rollout_of_row(self) -> np.ndarray:
        """int64 [n]: 0..R-1."""
        return self._rollouts[2]

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64 [g]: rollouts of each group."""
        return np.bincount(self.rollout_place)

    @cached_property
    def means(self) -> np.ndarray:
        """float64 [g]"""
        return self.sum_over_group(self.rollout_rewards) / self.sizes

    @cached_property
    def stds(self) -> np.ndarray:
        """float64 [g]: unbiased; 0 for a group of one."""
        centred = self.rollout_rewards - self.means[self.rollout_place]
        squares = self.sum_over_group(centred**2)
        return np.sqrt(squares / np.maximum(self.sizes - 1, 1))

    @cached_property
    def constant(self) -> np.ndarray:
        """bool [g]: all rows have the very same reward (a group of one rollout included)."""
        low, high = np.full(len(self.sizes), np.inf), np.full(len(self.sizes), -np.inf)
        np.minimum.at(low, self.rollout_place, self.rollout_rewards)
        np.maximum.at(high, self.rollout_place, self.rollout_rewards)
        return low == high

    def sum_over_group(self, per_rollout: np.ndarray) -> np.ndarray:
        """[R] -> float64 [g]"""
        return np.bincount(self.rollout_place, weights=per_rollout, minlength=len(self.sizes))
