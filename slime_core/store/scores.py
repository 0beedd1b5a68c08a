"""Overlays: what another grader says about stored rows. The rows themselves never change."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from slime_core.errors import ConfigError, DigestError, LostRaceError
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.cache import NodeCache
from slime_core.store.parts import read_about, serialise
from slime_core.store.schema import SCHEMA_VERSION
from slime_core.store.seal import Seal
from slime_core.store.values import to_json

SCORES = pa.schema(
    [
        ("scorer", pa.string()),
        ("segment", pa.int64()),
        ("group_id", pa.int64()),
        ("attempt", pa.int64()),
        ("row", pa.int64()),
        ("reward", pa.float64()),
        ("values", pa.large_utf8()),
        ("failure", pa.large_utf8()),
    ]
)


@dataclass(frozen=True)
class RowScore:
    """One row's new score.

    Attributes:
        row: place among the rows of its group.
        reward: the number, None where grading failed.
        values: the whole answer of a grader that gives a dictionary.
        failure: why there is no number.
    """

    group_id: int
    attempt: int
    row: int
    reward: float | None
    values: dict[str, Any] | None = None
    failure: str | None = None


def put_scores(backend: Backend, scorer: str, seal: Seal, scores: Sequence[RowScore]) -> str:
    """Stores the scores of a sealed segment; the first to write stays. Returns the key.

    Args:
        scorer: digest of the grader.
    """
    columns: dict[str, list[Any]] = {
        "scorer": [scorer] * len(scores),
        "segment": [seal.segment] * len(scores),
        "group_id": [score.group_id for score in scores],
        "attempt": [score.attempt for score in scores],
        "row": [score.row for score in scores],
        "reward": [score.reward for score in scores],
        "values": [s.values if s.values is None else to_json(s.values, "reward") for s in scores],
        "failure": [score.failure for score in scores],
    }
    batch = pa.RecordBatch.from_pydict(columns, schema=SCORES)
    about = {"format": "slime-flow scores", "version": SCHEMA_VERSION, "seal": seal.digest}
    key = layout.scores(scorer, seal.segment)
    with suppress(LostRaceError):
        backend.put_new(key, memoryview(serialise([batch], SCORES, about)))
    return key


def read_scores(cache: NodeCache, scorer: str, seal: Seal) -> pa.Table:
    """The overlay of one grader for one sealed segment.

    Raises:
        MissingError: the segment was not scored by it.
        DigestError: the overlay belongs to another seal, or is damaged.
    """
    key = layout.scores(scorer, seal.segment)
    table = _open(cache, key)
    if read_about(table.schema).get("seal") != seal.digest:
        raise DigestError(f"{key} was made for another seal of segment {seal.segment}")
    return table


def find_scorer(backend: Backend, beginning: str) -> str:
    """The one grader with an overlay whose digest begins so.

    Raises:
        ConfigError: there is none, or more than one.
    """
    keys = (entry.key.removeprefix(layout.SCORES) for entry in backend.list(layout.SCORES))
    scorers = sorted({key.partition("/")[0] for key in keys if "/" in key})
    found = [scorer for scorer in scorers if scorer.startswith(beginning)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(scorer[:12] for scorer in scorers) or "none: `slime rescore` makes them"
    raise ConfigError(
        f"{len(found)} graders with a digest that begins with {beginning!r} have graded this run; "
        f"there are {known}"
    )


def all_scores(cache: NodeCache) -> pa.Table:
    """Every overlay of a run."""
    tables = [
        _open(cache, entry.key).replace_schema_metadata(None)
        for entry in cache.backend.list(layout.SCORES)
        if entry.key.endswith(".arrow")
    ]
    return pa.concat_tables(tables) if tables else SCORES.empty_table()


def _open(cache: NodeCache, key: str) -> pa.Table:
    try:
        return pa.ipc.open_file(pa.BufferReader(cache.read(key))).read_all()
    except pa.ArrowInvalid as error:
        raise DigestError(f"{cache.backend.url}/{key} is damaged: {error}") from error
