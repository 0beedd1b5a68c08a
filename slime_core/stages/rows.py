"""Reading the kept groups of a sealed segment as columns."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from slime_core.errors import RewardError, StoreError
from slime_core.refs import is_finite
from slime_core.run.context import RunContext
from slime_core.store.columnar import SampleBatch
from slime_core.store.parts import KEPT, SPARE
from slime_core.store.seal import Seal, open_groups, read_seal

ERROR_KEY = '"reward_error"'


def kept_rows(ctx: RunContext, segment: int) -> tuple[Seal, dict[int, SampleBatch]]:
    """The seal of a segment, and the rows of each kept or spare group by group id, ascending.

    Raises:
        StoreError: the segment is not sealed.
    """
    seal = read_seal(ctx.backend, segment)
    if seal is None:
        raise StoreError(f"segment {segment} is not sealed yet; generate it first")
    finished = seal.as_segment().finished.values()
    usable = [group for group in finished if group.entry.verdict in (KEPT, SPARE)]
    kept = sorted(usable, key=lambda group: group.entry.group_id)
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


def graded(rows: SampleBatch) -> np.ndarray:
    """bool [rows]: False where a reward stands in for an answer that could not be graded and is
    left out of the loss, so that it says nothing about its siblings either."""
    failed = np.array([ERROR_KEY in (text or "") for text in rows.texts("metadata")], dtype=bool)
    return ~(failed & rows.numbers("remove_sample").astype(bool))


def greedy_rewards(chosen: Sequence[SampleBatch]) -> np.ndarray:
    """float64 [rows of all groups]: reward of the greedy answer to each row's prompt.

    Raises:
        RewardError: a row was generated without one.
    """
    texts = [text for batch in chosen for text in batch.texts("metadata")]
    found = [json.loads(text or "{}").get("greedy") for text in texts]
    if not all(isinstance(answer, dict) for answer in found):
        raise RewardError(
            "remax compares with greedy answers, which were not drawn when these groups were "
            "generated: use another advantage_estimator for this iteration"
        )
    return np.array([answer["reward"] for answer in found], dtype=np.float64)


def reward_errors(rows: SampleBatch) -> list[str]:
    """Why rows could not be graded, one reason for each that could not."""
    texts = [text for text in rows.texts("metadata") if text and ERROR_KEY in text]
    found = (json.loads(text).get("reward_error") for text in texts)
    return [str(error["reason"]) for error in found if isinstance(error, dict)]


def reward_values(rows: SampleBatch) -> list[dict[str, float]]:
    """[rows] the entries of dict rewards that are numbers."""
    values = [json.loads(text or "{}") for text in rows.texts("reward_values")]
    return [
        {k: float(v) for k, v in row.items() if isinstance(v, (int, float)) and is_finite(v)}
        for row in values
    ]


def turn_counts(rows: SampleBatch) -> list[int | None]:
    """[rows] turns of each row (metadata round_number); None where it does not say."""
    counts: list[int | None] = []
    for text in rows.texts("metadata"):
        told = json.loads(text).get("round_number") if text and '"round_number"' in text else None
        counts.append(told if isinstance(told, int) else None)
    return counts
