"""A stored batch with the rewards of another grader, or of another algorithm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slime_core.algorithms.advantages.groups import Groups
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError, DigestError
from slime_core.stages.pack import mask_sums, normalised
from slime_core.stages.rows import graded
from slime_core.store.batch import BatchContent
from slime_core.store.cache import NodeCache
from slime_core.store.load import load_groups
from slime_core.store.scores import read_scores
from slime_core.store.seal import read_seal


def regrouped(
    cache: NodeCache, content: BatchContent, config: RunConfig, scorer: str | None = None
) -> BatchContent:
    """The same rows in the same steps, with what the configuration makes of their rewards.

    A row that the other grader could not grade trains nothing and says nothing about its siblings.

    Args:
        scorer: digest of a grader whose overlay takes the place of the stored rewards.

    Raises:
        ConfigError: a function of the user's made the rewards, so nothing else can.
        MissingError: a segment of the batch has no such overlay.
        DigestError: rows or overlay are damaged.
    """
    if path := config.rewards.custom_reward_post_process_path:
        raise _made_by(f"{path} (custom_reward_post_process_path)")
    if content.converted is not None or config.rewards.custom_convert_samples_to_train_data_path:
        raise _made_by("a function (custom_convert_samples_to_train_data_path)")
    chosen = load_groups(cache, content)
    known = np.concatenate([graded(batch) for batch in chosen])
    raw = np.asarray(content.raw_rewards, dtype=np.float64)
    removed = set(content.removed)
    if scorer is not None:
        raw = _overlaid(cache, content, scorer)
        failed = np.isnan(raw)
        removed |= set(np.flatnonzero(failed).tolist())
        known, raw = ~failed, np.where(failed, 0.0, raw)
    trained = mask_sums(chosen)
    trained[sorted(removed)] = 0.0
    ids = np.repeat(
        [group.group_id for group in content.groups], [group.rows for group in content.groups]
    )
    groups = Groups(raw, ids, np.asarray(content.rollout_ids), trained)
    return replace(
        content,
        rewards=normalised(config, groups, chosen, known).tolist(),
        raw_rewards=raw.tolist(),
        removed=tuple(sorted(removed)),
    )


def _made_by(function: str) -> ConfigError:
    return ConfigError(
        f"the rewards of this batch were made by {function}, so they cannot be made again for "
        "another algorithm or grader"
    )


def _overlaid(cache: NodeCache, content: BatchContent, scorer: str) -> np.ndarray:
    """float64 [rows]: the other grader's rewards, NaN where it had none."""
    found: dict[tuple[int, int, int], float] = {}
    for segment in content.seals:
        seal = read_seal(cache.backend, segment)
        if seal is None:
            raise DigestError(f"segment {segment} of batch {content.iteration} is not sealed")
        table = read_scores(cache, scorer, seal)
        columns = (table[name].to_pylist() for name in ("group_id", "attempt", "row", "reward"))
        for group, attempt, row, reward in zip(*columns, strict=True):
            found[group, attempt, row] = np.nan if reward is None else reward
    wanted = [
        (group.group_id, group.attempt, row)
        for group in content.groups
        for row in range(group.rows)
    ]
    return np.array([found.get(place, np.nan) for place in wanted], dtype=np.float64)
