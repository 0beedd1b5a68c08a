"""A function of the user's in place of the built-in conversion of samples to training data.

It is asked once, when the batch is decided. What it gave stands in batch.json, so neither a resumed
run nor a replay asks again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slime_core.batching.converted import Converted
from slime_core.config.tree import RunConfig
from slime_core.plugins.args_view import ArgsView
from slime_core.plugins.load import load, source_digest
from slime_core.stages.batch_hooks import converted_rows
from slime_core.store.batch import RowChanges
from slime_core.store.columnar import SampleBatch
from slime_core.store.values import to_json


def convert(
    config: RunConfig,
    chosen: list[SampleBatch],
    raw: np.ndarray,
    rollouts: np.ndarray,
    removed: tuple[int, ...],
) -> Converted | None:
    """What the function makes of the batch, None without one.

    Args:
        raw: [rows] rewards as graded.
        rollouts: [rows] rows of one rollout share a number.
        removed: rows that a filter took out; they stay out.

    Raises:
        PluginError: it raised, or what it returned cannot be trained.
    """
    path = config.rewards.custom_convert_samples_to_train_data_path
    if path is None:
        return None
    copies, stored = ([one for batch in chosen for one in batch.to_samples()] for _ in range(2))
    for samples in (copies, stored):
        for row in removed:
            samples[row].remove_sample = True
    return converted_rows(path, ArgsView(config), copies, stored, raw, rollouts)


def converter_digest(config: RunConfig) -> dict[str, Any]:
    """Import path -> digest of the file that defines the function: for `by` of a batch, since two
    functions that return the same make the same batch."""
    path = config.rewards.custom_convert_samples_to_train_data_path
    return {} if path is None else {"converted_by": {path: source_digest(load(path))}}


def trained_tokens(
    stored: np.ndarray, removed: tuple[int, ...], made: Converted | None
) -> np.ndarray:
    """float64 [rows]: trained tokens of each row.

    Args:
        stored: [rows] as the rows say.
        removed: rows of which nothing is trained.
    """
    trained = stored.copy()
    for row, mask in {} if made is None else made.masks.items():
        trained[row] = mask.sum()
    trained[list(removed)] = 0.0
    return trained


def row_changes(made: Converted | None) -> RowChanges | None:
    """What the batch stores of it beside rewards and the rows that are left out.

    Raises:
        DataError: metadata that no store can hold.
    """
    if made is None:
        return None
    return RowChanges(
        masks={row: _stretches(mask) for row, mask in made.masks.items()},
        truncated=dict(made.truncated),
        metadata={
            row: None
            if value is None
            else to_json(
                value, f"metadata that the convert function gave for row {row} of the batch"
            )
            for row, value in made.metadata.items()
        },
    )


def _stretches(mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(start, length) of the runs of ones in a mask."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0])).astype(np.int8)))
    return tuple((int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True))
