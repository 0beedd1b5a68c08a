"""Which checkpoint is the best by a metric, under the names that MLflow and metrics.jsonl have."""

from __future__ import annotations

import math
from collections.abc import Iterable

from slime_core.errors import MissingError
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.checkpoints import Checkpoint
from slime_core.store.documents import read_document
from slime_core.tracking.projection import evaluation_record, iteration_record

EVAL = "eval/"


def best_checkpoint(
    backend: Backend, checkpoints: Iterable[Checkpoint], metric: str, *, lowest: bool = False
) -> tuple[Checkpoint, float] | None:
    """The checkpoint with the best value, the newest among equals; None where none has one yet.

    Args:
        metric: such as `eval/greedy` (of the weights that the checkpoint holds) or
            `rollout/raw_reward` (of its last iteration).
        lowest: the lowest value is the best one.
    """
    found: list[tuple[float, int, Checkpoint]] = []
    for checkpoint in checkpoints:
        value = value_at(backend, checkpoint, metric)
        if value is not None and math.isfinite(value):
            found.append((-value if lowest else value, checkpoint.iteration, checkpoint))
    if not found:
        return None
    value, _, checkpoint = max(found, key=lambda one: one[:2])
    return checkpoint, -value if lowest else value


def value_at(backend: Backend, checkpoint: Checkpoint, metric: str) -> float | None:
    """The metric of a checkpoint; None where it was not measured."""
    try:
        if metric.startswith(EVAL):
            return _of_evaluations(backend, checkpoint.weight_version, metric)
        k = checkpoint.iteration
        batch, ledger = (read_document(backend, name(k)) for name in (layout.batch, layout.ledger))
    except MissingError:
        return None
    record = iteration_record("", k, 0.0, batch.body, batch.by, (ledger.body, ledger.by), None, 1)
    return record.metrics.get(metric)


def _of_evaluations(backend: Backend, version: str, metric: str) -> float | None:
    for entry in backend.list(f"{layout.EVALS}{version}/"):
        if entry.key.endswith(".json"):
            body = read_document(backend, entry.key).body
            found = evaluation_record("", 0.0, body).metrics
            if metric in found:
                return found[metric]
    return None
