"""What a run stores, as flat Arrow tables: one row an iteration, group, sample or token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from slime_core.errors import DigestError
from slime_core.store.batch import Batch, read_batch
from slime_core.store.cache import NodeCache
from slime_core.store.columnar import SampleBatch
from slime_core.store.ledger import read_ledger
from slime_core.store.schema import PART_SCHEMA
from slime_core.store.seal import Seal, open_groups, read_seal

SAMPLES = pa.schema([f for f in PART_SCHEMA if not pa.types.is_nested(f.type)])
"""Every column of a part that holds one value a row."""
ROWS = PART_SCHEMA
GROUPS = pa.schema(
    [
        ("segment", pa.int64()),
        ("group_id", pa.int64()),
        ("attempt", pa.int64()),
        ("verdict", pa.string()),
        ("reason", pa.string()),
        ("rows", pa.int64()),
        ("rollouts", pa.int64()),
        ("tokens", pa.int64()),
        ("digest", pa.string()),
    ]
)
LOST = pa.schema(
    [
        ("segment", pa.int64()),
        ("group_id", pa.int64()),
        ("attempt", pa.int64()),
        ("plane", pa.string()),
    ]
)
TRAINED = pa.schema(
    [
        ("iteration", pa.int64()),
        ("group_id", pa.int64()),
        ("attempt", pa.int64()),
        ("segment", pa.int64()),
    ]
)
ITERATIONS = pa.schema(
    [
        ("iteration", pa.int64()),
        ("groups", pa.int64()),
        ("rows", pa.int64()),
        ("tokens", pa.int64()),
        ("reward", pa.float64()),
        ("steps", pa.int64()),
        ("skipped", pa.int64()),
        ("loss", pa.float64()),
        ("grad_norm", pa.float64()),
        ("lr", pa.float64()),
        ("weight_version", pa.string()),
        ("state", pa.string()),
        ("epoch", pa.int64()),
        ("wall_s", pa.float64()),
    ]
)
TOKENS = pa.schema(
    [
        ("segment", pa.int64()),
        ("group_id", pa.int64()),
        ("attempt", pa.int64()),
        ("sample", pa.int64()),
        ("place", pa.int64()),
        ("token", pa.int32()),
        ("log_prob", pa.float32()),
        ("trained", pa.bool_()),
    ]
)


def samples_table(cache: NodeCache, segments: Iterable[int]) -> pa.Table:
    """SAMPLES of sealed segments."""
    batches = [
        batch.rows.select(SAMPLES.names).cast(SAMPLES)
        for segment in segments
        for batch in sealed_rows(cache, segment)
    ]
    return pa.Table.from_batches(batches, SAMPLES).combine_chunks()


def groups_table(cache: NodeCache, segments: Iterable[int]) -> pa.Table:
    """GROUPS of sealed segments, every attempt."""
    rows = []
    for segment in segments:
        for group in _seal(cache, segment).groups:
            e = group.entry
            rows.append(
                (segment, e.group_id, e.attempt, e.verdict, e.reason, e.rows, e.rollouts, e.tokens,
                 e.digest)
            )  # fmt: skip
    return _table(rows, GROUPS)


def lost_table(cache: NodeCache, segments: Iterable[int]) -> pa.Table:
    """LOST: a row for each group of sealed segments and each plane that it had and lost."""
    rows = []
    for segment in segments:
        groups = _seal(cache, segment).groups
        files = open_groups(cache, groups)
        for place in ((group.entry.group_id, group.entry.attempt) for group in groups):
            file, number = files[place]
            rows += [(segment, *place, plane) for plane in sorted(file.lost(number))]
    return _table(rows, LOST)


def trained_table(cache: NodeCache, iterations: Iterable[int]) -> pa.Table:
    """TRAINED: which iteration's batch holds which group."""
    rows = [
        (k, group.group_id, group.attempt, group.segment)
        for k in iterations
        for group in _batch(cache, k).content.groups
    ]
    return _table(rows, TRAINED)


def iterations_table(cache: NodeCache, iterations: Iterable[int]) -> pa.Table:
    """ITERATIONS of those that have a ledger."""
    rows = []
    for k in iterations:
        content, ledger = _batch(cache, k).content, read_ledger(cache.backend, k)
        if ledger is None:
            raise DigestError(f"the ledger of iteration {k} went away while it was read")
        steps = ledger.result["steps"]
        taken = [step for step in steps if not step.get("skipped")]
        rewards = content.raw_rewards
        rows.append(
            (
                k, len(content.groups), content.rows, content.tokens,
                sum(rewards) / len(rewards) if rewards else None,
                len(steps), len(steps) - len(taken),
                _mean(taken, "loss"), _mean(taken, "grad_norm"),
                steps[-1].get("lr") if steps else None,
                ledger.weight_version, ledger.state,
                ledger.by.get("epoch"), ledger.by.get("wall_s"),
            )
        )  # fmt: skip
    return _table(rows, ITERATIONS)


def token_batches(cache: NodeCache, segments: Iterable[int]) -> Iterator[pa.RecordBatch]:
    """TOKENS of the responses, one record batch a group; read as they are asked for."""
    for segment in segments:
        for batch in sealed_rows(cache, segment):
            yield _tokens(batch)


def row_batches(cache: NodeCache, segments: Iterable[int]) -> Iterator[pa.RecordBatch]:
    """Whole rows of sealed segments with every column, one record batch a group."""
    for segment in segments:
        for batch in sealed_rows(cache, segment):
            rows = batch.rows
            yield rows if isinstance(rows, pa.RecordBatch) else rows.to_batches()[0]


def sealed_rows(cache: NodeCache, segment: int) -> Iterator[SampleBatch]:
    """The rows of each group that a seal lists, in its order."""
    groups = _seal(cache, segment).groups
    files = open_groups(cache, groups)
    for group in groups:
        file, number = files[group.entry.group_id, group.entry.attempt]
        yield file.rows(number)


def _tokens(batch: SampleBatch) -> pa.RecordBatch:
    tokens, lengths = batch.tokens, batch.numbers("response_length").astype(np.int64)
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    place = np.arange(total) - np.repeat(starts, lengths)
    at = np.repeat(tokens.offsets[1:] - lengths, lengths) + place
    repeated = {
        name: np.repeat(batch.numbers(column), lengths)
        for name, column in (
            ("segment", "segment"),
            ("group_id", "group_index"),
            ("attempt", "attempt"),
            ("sample", "sample_position"),
        )
    }
    mask = _of_response(batch, "loss_mask", lengths, 1).astype(bool)
    mask &= ~np.repeat(batch.numbers("remove_sample").astype(bool), lengths)
    log_probs = _of_response(batch, "rollout_log_probs", lengths, np.nan)
    columns = {
        **repeated,
        "place": place,
        "token": tokens.values[at],
        "log_prob": pa.array(log_probs, pa.float32(), from_pandas=True),
        "trained": mask,
    }
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[field.name], field.type) for field in TOKENS], schema=TOKENS
    )


def _of_response(batch: SampleBatch, name: str, lengths: np.ndarray, missing: float) -> np.ndarray:
    """[sum of lengths]: a column with one entry a response token; `missing` where it is null."""
    column = batch.ragged(name)
    if column.valid.all():
        return column.values
    rows = [
        column.row(i) if there else np.full(lengths[i], missing)
        for i, there in enumerate(column.valid)
    ]
    return np.concatenate(rows)


def _mean(steps: list[dict[str, Any]], name: str) -> float | None:
    values = [step[name] for step in steps if step.get(name) is not None]
    return sum(values) / len(values) if values else None


def _table(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.Table.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)],
        schema=schema,
    )


def _seal(cache: NodeCache, segment: int) -> Seal:
    seal = read_seal(cache.backend, segment)
    if seal is None:
        raise DigestError(f"the seal of segment {segment} went away while it was read")
    return seal


def _batch(cache: NodeCache, iteration: int) -> Batch:
    batch = read_batch(cache.backend, iteration)
    if batch is None:
        raise DigestError(f"the batch of iteration {iteration} went away while it was read")
    return batch
