"""From a stored batch to the columns the trainer takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_core.batching.types import TrainBatch, offsets_of
from slime_core.errors import DigestError
from slime_core.sample import Status
from slime_core.store.backend import Backend
from slime_core.store.batch import Batch, BatchContent, RowChanges
from slime_core.store.cache import NodeCache
from slime_core.store.columnar import Ragged, SampleBatch
from slime_core.store.seal import StoredGroup, open_groups, read_seal
from slime_core.store.values import from_json


def load_groups(cache: NodeCache, content: BatchContent) -> list[SampleBatch]:
    """The rows of each group of a batch, in batch order, as views of the mapped parts.

    Raises:
        DigestError: a seal or part is gone, damaged, or not the one the batch names.
    """
    sealed: dict[tuple[int, int, int], StoredGroup] = {}
    for segment, digest in content.seals.items():
        seal = read_seal(cache.backend, segment)
        if seal is None or seal.digest != digest:
            raise DigestError(
                f"batch {content.iteration} names a seal of segment {segment} that is not there"
            )
        for group in seal.groups:
            sealed[segment, group.entry.group_id, group.entry.attempt] = group
    wanted = []
    for group in content.groups:
        stored = sealed.get((group.segment, group.group_id, group.attempt))
        if stored is None or stored.entry.digest != group.digest:
            raise DigestError(
                f"batch {content.iteration} names rows of group {group.group_id} that segment "
                f"{group.segment} does not hold"
            )
        wanted.append(stored)
    files = open_groups(cache, wanted)
    rows = []
    for group in content.groups:
        file, record_batch = files[group.group_id, group.attempt]
        rows.append(file.rows(record_batch))
    return rows


def load_train_batch(backend: Backend, batch: Batch, cache: NodeCache | None = None) -> TrainBatch:
    """Everything an iteration trains, in the order of its batch, with what a function over the
    batch changed.

    Rows without a mask train every response token; removed rows train none. Tokens without
    rollout log-probs get NaN, so that nothing can use them unnoticed.

    Args:
        cache: where parts of a remote store are kept on this node.

    Raises:
        DigestError: what the batch names is not there or is damaged.
    """
    content = batch.content
    groups = load_groups(cache or NodeCache(backend), content)
    response_lengths = _column(groups, "response_length", np.int64)
    changes = content.converted or RowChanges()
    removed = _column(groups, "remove_sample", np.bool_).copy()
    removed[list(content.removed)] = True
    stored = [s == Status.TRUNCATED.value for g in groups for s in g.texts("status")]
    truncated = np.asarray(stored, dtype=np.uint8)
    for row, value in changes.truncated.items():
        truncated[row] = value
    tokens = [group.tokens for group in groups]
    token_offsets = offsets_of(np.concatenate([column.lengths for column in tokens]))
    masks = _per_response(groups, "loss_mask", response_lengths, np.uint8, 1)
    response_offsets = offsets_of(response_lengths)
    _lay_over(masks, response_offsets, changes)
    masks[np.repeat(removed, response_lengths)] = 0
    group_ids = np.repeat(
        np.array([group.group_id for group in content.groups], dtype=np.int64),
        [group.rows for group in content.groups],
    )
    return TrainBatch(
        tokens=np.concatenate([column.values for column in tokens]),
        token_offsets=token_offsets,
        response_lengths=response_lengths,
        loss_mask=masks,
        rollout_log_probs=_per_response(
            groups, "rollout_log_probs", response_lengths, np.float32, np.nan
        ),
        response_offsets=response_offsets,
        rewards=np.asarray(content.rewards, dtype=np.float64),
        raw_rewards=np.asarray(content.raw_rewards, dtype=np.float64),
        group_ids=group_ids,
        rollout_ids=np.asarray(content.rollout_ids, dtype=np.int64),
        denominators=np.asarray(content.denominators, dtype=np.float64),
        steps=content.steps,
        truncated=truncated,
        metadata=_metadata(groups, changes),
        routes=_routes(groups),
    )


def _lay_over(masks: np.ndarray, offsets: np.ndarray, changes: RowChanges) -> None:
    """Puts the masks that a function over the batch made in the place of the stored ones.

    Raises:
        DigestError: one reaches beyond its response.
    """
    for row, trained in changes.masks.items():
        mask = masks[offsets[row] : offsets[row + 1]]
        mask[:] = 0
        for start, length in trained:
            if not 0 <= start < start + length <= len(mask):
                raise DigestError(f"the batch trains tokens of row {row} that it does not have")
            mask[start : start + length] = 1


def _metadata(
    groups: Sequence[SampleBatch], changes: RowChanges
) -> tuple[dict[str, Any] | None, ...]:
    """[rows] `train_metadata`; () where no row has any."""
    texts = [text for group in groups for text in group.texts("train_metadata")]
    for row, text in changes.metadata.items():
        texts[row] = text
    if not any(text is not None for text in texts):
        return ()
    return tuple(None if text is None else from_json(text) for text in texts)


def _routes(groups: Sequence[SampleBatch]) -> tuple[np.ndarray | None, ...]:
    """[rows] experts that the engine chose, views of the mapped parts; () where no row has any."""
    found = [experts for group in groups for experts in group.experts()]
    return tuple(found) if any(experts is not None for experts in found) else ()


def _column(groups: Sequence[SampleBatch], name: str, dtype: type) -> np.ndarray:
    """[rows]"""
    return np.concatenate([group.numbers(name) for group in groups]).astype(dtype, copy=False)


def _per_response(
    groups: Sequence[SampleBatch], name: str, lengths: np.ndarray, dtype: type, missing: float
) -> np.ndarray:
    """[sum of lengths] with `missing` where a row has no such column."""
    columns = [group.ragged(name) for group in groups]
    if all(column.valid.all() for column in columns):
        return np.concatenate([column.values for column in columns])
    rows = [row for column in columns for row in _rows(column)]
    filled = [
        np.full(length, missing, dtype=dtype) if row is None else row
        for row, length in zip(rows, lengths, strict=True)
    ]
    return np.concatenate(filled)


def _rows(column: Ragged) -> list[np.ndarray | None]:
    return [column.row(i) if column.valid[i] else None for i in range(len(column.valid))]
