"""Reads what a run's store holds, for the planner."""

from __future__ import annotations

from typing import TypeVar

from slime_core.errors import DigestError
from slime_core.run.plan import History
from slime_core.store import layout
from slime_core.store.batch import Batch, read_batch
from slime_core.store.cache import NodeCache
from slime_core.store.checkpoints import list_checkpoints
from slime_core.store.draws import list_draws, read_draws
from slime_core.store.ledger import Ledger, read_ledger
from slime_core.store.seal import Seal, Segment, adopt, read_seal

T = TypeVar("T")


def read_history(cache: NodeCache, start: str) -> History:
    """Everything the planner needs. Open segments are adopted, their damaged parts quarantined.

    Args:
        start: S_-1, from the digest of the initial weights.

    Raises:
        DigestError: a document or a file of draws is damaged or missing; names it.
    """
    backend = cache.backend
    sealed, open_segments = _segments(cache)
    kinds: dict[str, set[int]] = {"batch": set(), "ledger": set(), "sync": set()}
    for entry in backend.list(layout.ITERATIONS):
        parsed = layout.parse_iteration(entry.key)
        if parsed is not None:
            kinds[parsed[1]].add(parsed[0])
    seals: dict[int, Seal] = {}
    for segment in sealed:
        seals[segment] = _there(read_seal(backend, segment), layout.seal(segment))
    batches: dict[int, Batch] = {}
    for iteration in kinds["batch"]:
        batches[iteration] = _there(read_batch(backend, iteration), layout.batch(iteration))
    ledgers: dict[int, Ledger] = {}
    for iteration in kinds["ledger"]:
        ledgers[iteration] = _there(read_ledger(backend, iteration), layout.ledger(iteration))
    unsealed: dict[int, Segment] = {segment: adopt(cache, segment) for segment in open_segments}
    return History(
        start=start,
        draws=[read_draws(cache, seq, samples=False) for seq in list_draws(backend)],
        seals=seals,
        unsealed=unsealed,
        batches=dict(sorted(batches.items())),
        ledgers=ledgers,
        checkpoints=list_checkpoints(backend),
        synced=frozenset(kinds["sync"]),
    )


def _segments(cache: NodeCache) -> tuple[list[int], list[int]]:
    """(sealed, open) segments, ascending."""
    sealed, seen = set(), set()
    for entry in cache.backend.list(layout.GROUPS):
        segment = layout.parse_seal(entry.key)
        if segment is not None:
            sealed.add(segment)
        name = layout.parse_part(entry.key)
        if name is not None:
            seen.add(name.segment)
    return sorted(sealed), sorted(seen - sealed)


def _there(value: T | None, key: str) -> T:
    if value is None:
        raise DigestError(f"{key} went away while it was read")
    return value
