"""What an iteration trains: which groups, in which optimizer step, with which denominators.

Independent of the number of ranks and of micro-batches; the result is sealed in batch.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime_core.errors import ConfigError, DataError


@dataclass(frozen=True)
class GroupVerdict:
    """A finished group as the group log knows it.

    Attributes:
        group_id: number of the draw.
        keep: False where a filter dropped the group.
        reason: why it was dropped, empty otherwise.
        spare: it was dropped, but may fill a batch that cannot be filled otherwise.
    """

    group_id: int
    keep: bool = True
    reason: str = ""
    spare: bool = False


@dataclass(frozen=True)
class GroupSelection:
    """chosen: ascending group ids of the batch. unused: reason of every other finished group."""

    chosen: tuple[int, ...]
    unused: dict[int, str]


def choose_groups(finished: Sequence[GroupVerdict], rollout_batch_size: int) -> GroupSelection:
    """Takes the kept groups with the lowest ids, and spare ones where these are too few.

    By id and never by the order of finishing: what finishes first is short, and a batch of the
    short ones is biased.

    Args:
        finished: all finished groups that no batch has used, in any order.
        rollout_batch_size: groups a batch holds.

    Raises:
        DataError: a group is listed twice, or too few were kept.
    """
    ids = [verdict.group_id for verdict in finished]
    if len(set(ids)) != len(ids):
        twice = sorted({i for i in ids if ids.count(i) > 1})
        raise DataError(f"groups {twice[:5]} are listed twice among the finished groups")
    kept = sorted(verdict.group_id for verdict in finished if verdict.keep)
    spare = sorted(verdict.group_id for verdict in finished if verdict.spare)
    kept = sorted(kept + spare[: max(0, rollout_batch_size - len(kept))])
    if len(kept) < rollout_batch_size:
        raise DataError(
            f"a batch needs rollout_batch_size = {rollout_batch_size} groups, only {len(kept)} of "
            f"{len(finished)} finished groups were kept"
        )
    unused = {v.group_id: v.reason or "dropped" for v in finished if v.group_id not in set(kept)}
    unused |= dict.fromkeys(kept[rollout_batch_size:], "surplus")
    return GroupSelection(tuple(kept[:rollout_batch_size]), unused)


def check_batch_identity(
    rollout_batch_size: int,
    n_samples_per_prompt: int,
    global_batch_size: int,
    num_steps_per_rollout: int,
) -> None:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout.

    Raises:
        ConfigError: a number is below 1 or the identity does not hold; names all four.
    """
    named = {
        "rollout_batch_size": rollout_batch_size,
        "n_samples_per_prompt": n_samples_per_prompt,
        "global_batch_size": global_batch_size,
        "num_steps_per_rollout": num_steps_per_rollout,
    }
    for name, value in named.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    made = rollout_batch_size * n_samples_per_prompt
    used = global_batch_size * num_steps_per_rollout
    if made != used:
        raise ConfigError(
            f"rollout_batch_size {rollout_batch_size} x n_samples_per_prompt "
            f"{n_samples_per_prompt} = {made} rollouts, but global_batch_size "
            f"{global_batch_size} x num_steps_per_rollout {num_steps_per_rollout} = {used}: "
            "every rollout is trained exactly once, so the two must be equal"
        )


def optimizer_steps(
    rollout_ids: Sequence[int] | np.ndarray, global_batch_size: int, num_steps_per_rollout: int
) -> tuple[tuple[int, ...], ...]:
    """Deals rows to optimizer steps: whole rollouts, in the order of their first row.

    Args:
        rollout_ids: [n] rollout of each row; fanned-out rows share one.
        global_batch_size: rollouts (not rows) of a step.
        num_steps_per_rollout: steps of the iteration.

    Returns:
        Row indices of each step.

    Raises:
        DataError: the number of rollouts is not global_batch_size x num_steps_per_rollout.
    """
    order: dict[int, list[int]] = {}
    for row, rollout in enumerate(rollout_ids):
        order.setdefault(int(rollout), []).append(row)
    expected = global_batch_size * num_steps_per_rollout
    if len(order) != expected:
        raise DataError(
            f"the batch has {len(order)} rollouts in {len(rollout_ids)} rows, but "
            f"global_batch_size {global_batch_size} x num_steps_per_rollout "
            f"{num_steps_per_rollout} = {expected}"
        )
    rollouts = list(order.values())
    return tuple(
        tuple(row for rows in rollouts[start : start + global_batch_size] for row in rows)
        for start in range(0, expected, global_batch_size)
    )


def rollout_denominators(
    mask_sums: Sequence[float] | np.ndarray, rollout_ids: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Trained tokens of the whole rollout of each row.

    Args:
        mask_sums: [n] trained tokens of each row.
        rollout_ids: [n]

    Returns:
        float64 [n]
    """
    _, place = np.unique(np.asarray(rollout_ids), return_inverse=True)
    return np.bincount(place, weights=np.asarray(mask_sums, dtype=np.float64))[place]


@dataclass(frozen=True)
class StepTotals:
    """What the loss of a step is divided by, counted over all ranks and micro-batches.

    Attributes:
        rollouts: number of rollouts; also fully masked ones count.
        tokens: number of trained tokens.
        rows: number of samples.
        trained_rollouts: rollouts with a trained token; means of metrics are over these.
    """

    rollouts: int
    tokens: int
    rows: int
    trained_rollouts: int


def step_totals(
    rows: Sequence[int],
    rollout_ids: Sequence[int] | np.ndarray,
    mask_sums: Sequence[float] | np.ndarray,
) -> StepTotals:
    """Counts one optimizer step (the same on every rank: it needs no communication).

    Args:
        rows: the rows of the step.
        rollout_ids: [n] of the whole batch.
        mask_sums: [n] trained tokens of each row of the whole batch.
    """
    index = np.asarray(rows, dtype=np.int64)
    rollouts, trained = np.asarray(rollout_ids)[index], np.asarray(mask_sums)[index]
    return StepTotals(
        rollouts=len(np.unique(rollouts)),
        tokens=int(trained.sum()),
        rows=len(index),
        trained_rollouts=len(np.unique(rollouts[trained > 0])),
    )
