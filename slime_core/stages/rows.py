"""Reading the kept groups of a sealed segment as columns."""

from __future__ import annotations

import json

import numpy as np

from slime_core.errors import RewardError, StoreError
from slime_core.run.context import RunContext
from slime_core.store.columnar import SampleBatch
from slime_core.store.seal import Seal, open_groups, read_seal


def kept_rows(ctx: RunContext, segment: int) -> tuple[Seal, dict[int, SampleBatch]]:
    """The seal of a segment, and the rows of each kept group by group id, ascending.

    Raises:
        StoreError: the segment is not sealed.
    """
    seal = read_seal(ctx.backend, segment)
    if seal is None:
        raise StoreError(f"segment {segment} is not sealed yet; generate it first")
    kept = sorted(seal.as_segment().kept, key=lambda group: group.entry.group_id)
    files = open_groups(ctx.cache, kept)
    rows = {}
    for group in kept:
        file, batch = files[group.entry.group_id, group.entry.attempt]
        rows[group.entry.group_id] = file.rows(batch)
    return seal, rows


def raw_rewards(ctx: RunContext, rows: SampleBatch) -> np.ndarray:
    """float64 [rows]: rewards as graded; the entry `reward_key` of dict rewards.

    Raises:
        RewardError: a row has no reward.
    """
    key = ctx.config.rewards.reward_key
    if key is None:
        if not rows.valid("reward").all():
            raise RewardError("a kept row has no reward; set reward_key if rewards are dicts")
        return rows.numbers("reward").astype(np.float64)
    values = [json.loads(text or "{}").get(key) for text in rows.texts("reward_values")]
    if any(value is None for value in values):
        raise RewardError(f"a kept row has no reward {key!r} (reward_key)")
    return np.asarray(values, dtype=np.float64)
