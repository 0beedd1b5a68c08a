"""batch.json: which groups an iteration trains, in which optimizer step, with which rewards.

It names rows by (group, attempt, digest) and never by position, so it stays true when parts are
rewritten, and holds nothing that depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import DataError, MissingError
from slime_core.refs import Ref
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.documents import Document, Owner, put_document, read_document


@dataclass(frozen=True)
class BatchGroup:
    """A group of a batch: the rows of one attempt, found through the seal of its segment."""

    group_id: int
    attempt: int
    segment: int
    rows: int
    digest: str


@dataclass(frozen=True)
class RowChanges:
    """What a function over the batch made other than the stored rows say, by row.

    Attributes:
        masks: (start, length) of the trained stretches of the response.
        truncated: 1 or 0.
        metadata: `train_metadata` as text (store.values); None takes it away.
    """

    masks: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    truncated: Mapping[int, int] = field(default_factory=dict)
    metadata: Mapping[int, str | None] = field(default_factory=dict)

    def to_body(self) -> dict[str, Any]:
        return {
            "masks": {str(row): [list(one) for one in mask] for row, mask in self.masks.items()},
            "truncated": {str(row): value for row, value in self.truncated.items()},
            "metadata": {str(row): text for row, text in self.metadata.items()},
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> RowChanges:
        return cls(
            {int(row): tuple((s, n) for s, n in mask) for row, mask in body["masks"].items()},
            {int(row): value for row, value in body["truncated"].items()},
            {int(row): text for row, text in body["metadata"].items()},
        )


@dataclass(frozen=True)
class BatchContent:
    """What pack decided. Rows are those of `groups`, one group after another.

    Attributes:
        iteration: the iteration that trains it.
        groups: in batch order.
        seals: digest of the seal of each segment that groups come from.
        rewards: [rows] what advantages start from (after the estimator's group transform).
        raw_rewards: [rows] as graded.
        rollout_ids: [rows] siblings share one.
        denominators: [rows] trained tokens of the whole rollout.
        steps: row indices of each optimizer step.
        unused: (group id, attempt, segment, reason) of finished groups that nothing will train.
        overlays: digest of each score overlay that was applied, by scorer.
        tokens: response tokens of all rows.
        metrics: what is told about the generated batch, by metric name.
        removed: rows that a function over the batch took out of the loss.
        converted: what a function that made the batch changed of its rows; None without one.
    """

    iteration: int
    groups: tuple[BatchGroup, ...]
    seals: dict[int, str]
    rewards: Sequence[float]
    raw_rewards: Sequence[float]
    rollout_ids: Sequence[int]
    denominators: Sequence[float]
    steps: tuple[tuple[int, ...], ...]
    unused: tuple[tuple[int, int, int, str], ...] = ()
    overlays: dict[str, str] | None = None
    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    removed: tuple[int, ...] = ()
    converted: RowChanges | None = None

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


@dataclass(frozen=True)
class Batch:
    """A stored batch."""

    content: BatchContent
    digest: str
    found: bool = False

    def ref(self) -> Ref:
        content = self.content
        key = layout.batch(content.iteration)
        return Ref(
            key, "batch", content.iteration, content.rows, content.tokens, self.digest, self.found
        )


def put_batch(
    backend: Backend, owner: Owner, content: BatchContent, by: dict[str, Any] | None = None
) -> Batch:
    """Stores what an iteration trains.

    Raises:
        DataError: columns whose length is not the number of rows, a group that is there twice, or
            a step that names a row twice or one that does not exist.
        StaleOwnerError: another owner decided something else, or owns the run.
    """
    _check(content)
    body = {
        "iteration": content.iteration,
        "groups": [[g.group_id, g.attempt, g.segment, g.rows, g.digest] for g in content.groups],
        "seals": {str(segment): digest for segment, digest in content.seals.items()},
        "rewards": [float(value) for value in content.rewards],
        "raw_rewards": [float(value) for value in content.raw_rewards],
        "rollout_ids": [int(value) for value in content.rollout_ids],
        "denominators": [float(value) for value in content.denominators],
        "steps": [[int(row) for row in step] for step in content.steps],
        "unused": [list(item) for item in content.unused],
        "overlays": dict(content.overlays or {}),
        "tokens": content.tokens,
        "metrics": dict(content.metrics),
    }
    if content.removed:
        body["removed"] = list(content.removed)
    if content.converted is not None:
        body["converted"] = content.converted.to_body()
    key = layout.batch(content.iteration)
    return _batch(put_document(backend, key, body, by, owner=owner))


def read_batch(backend: Backend, iteration: int) -> Batch | None:
    """The batch of an iteration, None before it is packed. Raises DigestError if damaged."""
    try:
        return _batch(read_document(backend, layout.batch(iteration)))
    except MissingError:
        return None


def _check(content: BatchContent) -> None:
    name = layout.batch(content.iteration)
    for column in ("rewards", "raw_rewards", "rollout_ids", "denominators"):
        length = len(getattr(content, column))
        if length != content.rows:
            raise DataError(f"{name}: {length} {column} for {content.rows} rows")
    ids = [group.group_id for group in content.groups]
    if len(set(ids)) != len(ids):
        raise DataError(f"{name} trains a group twice")
    rows = [row for step in content.steps for row in step]
    if len(set(rows)) != len(rows) or any(not 0 <= row < content.rows for row in rows):
        raise DataError(f"{name}: its steps name a row twice or one that is not there")
    if any(not 0 <= row < content.rows for row in content.removed):
        raise DataError(f"{name}: it takes out a row that is not there")
    made = content.converted or RowChanges()
    changed = {*made.masks, *made.truncated, *made.metadata}
    if any(not 0 <= row < content.rows for row in changed):
        raise DataError(f"{name}: it changes a row that is not there")
    missing = {group.segment for group in content.groups} - set(content.seals)
    if missing:
        raise DataError(f"{name}: groups come from unsealed segments {sorted(missing)}")


def _batch(document: Document) -> Batch:
    body = document.body
    content = BatchContent(
        iteration=body["iteration"],
        groups=tuple(BatchGroup(*group) for group in body["groups"]),
        seals={int(segment): digest for segment, digest in body["seals"].items()},
        rewards=body["rewards"],
        raw_rewards=body["raw_rewards"],
        rollout_ids=body["rollout_ids"],
        denominators=body["denominators"],
        steps=tuple(tuple(step) for step in body["steps"]),
        unused=tuple((g, a, s, reason) for g, a, s, reason in body["unused"]),
        overlays=body["overlays"],
        tokens=body["tokens"],
        metrics=body["metrics"],
        removed=tuple(body.get("removed", ())),
        converted=RowChanges.from_body(body["converted"]) if "converted" in body else None,
    )
    return Batch(content, document.digest, document.found)
