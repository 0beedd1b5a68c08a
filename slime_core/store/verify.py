"""Reads everything a run stores and checks it against what was signed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slime_core.errors import DigestError, SlimeError
from slime_core.store import layout
from slime_core.store.backend import Entry
from slime_core.store.batch import Batch, read_batch
from slime_core.store.cache import NodeCache
from slime_core.store.checkpoints import list_checkpoints, verify_checkpoint
from slime_core.store.digest import rows_digest
from slime_core.store.documents import read_document
from slime_core.store.draws import list_draws, read_draws
from slime_core.store.ledger import read_ledger, unbroken_chain
from slime_core.store.parts import open_part
from slime_core.store.seal import Listed, read_listed


def verify_run(
    cache: NodeCache,
    start: str | None = None,
    *,
    rows: bool = False,
    on_object: Callable[[Entry], None] = lambda entry: None,
) -> list[str]:
    """Checks every part, document, reference, the chain of states and the checkpoints.

    Args:
        start: S_-1; without it the chain is followed from what its first entry names.
        rows: also recompute the digest of each group's rows. A part's checksum covers them
            already; this finds a program that signed something else than it wrote.
        on_object: called for each object once it was read.

    Returns:
        One sentence for each thing that is wrong; nothing is moved or changed.
    """
    check = _Verification(cache, rows)
    for entry in cache.backend.list():
        with check.noting():
            check.object(entry.key)
        on_object(entry)
    with check.noting():
        for number in list_draws(cache.backend):
            with check.noting():
                read_draws(cache, number, samples=False)
    check.references()
    with check.noting():
        check.chain(start)
    for checkpoint in list_checkpoints(cache.backend):
        with check.noting():
            verify_checkpoint(cache, checkpoint)
    return list(dict.fromkeys(check.problems))


class _Verification:
    """What was read so far: each part is opened once."""

    def __init__(self, cache: NodeCache, rows: bool) -> None:
        self.problems: list[str] = []
        self._cache = cache
        self._rows = rows
        self._parts: dict[str, dict[tuple[int, int], str]] = {}
        self._compact: dict[int, str] = {}
        self._dropped: set[int] = set()
        self._seals: dict[int, tuple[str, Listed]] = {}
        self._batches: dict[int, Batch] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Turns an error into a problem."""
        try:
            yield
        except SlimeError as error:
            self.problems.append(str(error))

    def object(self, key: str) -> None:
        """Reads one object. Raises what is wrong with it."""
        backend = self._cache.backend
        segment, iteration = layout.parse_seal(key), layout.parse_iteration(key)
        if key.startswith(layout.QUARANTINE):
            return
        if layout.parse_part(key) is not None or layout.parse_compact(key) is not None:
            self._part(key)
        elif (dropped := layout.parse_dropped(key)) is not None:
            read_document(backend, key)
            self._dropped.add(dropped)
        elif segment is not None:
            self._seals[segment] = read_listed(backend, segment)
        elif iteration is not None and iteration[1] == "batch":
            if (batch := read_batch(backend, iteration[0])) is not None:
                self._batches[iteration[0]] = batch
        elif layout.parse_manifest(key) is not None or (
            key.endswith(".json") and not key.startswith(layout.CHECKPOINTS)
        ):
            read_document(backend, key)

    def references(self) -> None:
        """Follows batches to seals and seals to parts."""
        for segment, (_, listed) in self._seals.items():
            for part, groups in listed.items() if segment not in self._dropped else ():
                self._listed(segment, part, groups)
        for batch in self._batches.values():
            self._batch(batch)

    def chain(self, start: str | None) -> None:
        """Raises DigestError where the chain of states is broken."""
        if start is None:
            first = read_ledger(self._cache.backend, 0)
            start = "" if first is None else first.parent
        unbroken_chain(self._cache.backend, start)

    def _listed(self, segment: int, part: str, groups: dict[tuple[int, int], str]) -> None:
        """Groups lie in their part, or in the file that their segment was compacted to."""
        held = self._parts.get(part) or self._parts.get(self._compact.get(segment, ""))
        if held is None:
            self.problems.append(f"{part} is gone or damaged, but a seal needs it")
        elif not groups.items() <= held.items():  # one look at all of them: there may be many
            self.problems += [
                f"{part} holds other rows for group {group}"
                for (group, attempt), digest in groups.items()
                if held.get((group, attempt)) != digest
            ]

    def _part(self, key: str) -> None:
        file = open_part(self._cache, key)
        if (compact := layout.parse_compact(key)) is not None:
            self._compact[compact.segment] = key
        self._parts[key] = file.digests
        for group in file.part.groups if self._rows else ():
            if rows_digest(file.rows(group.batch).rows) != file.digest_of(group.batch):
                raise DigestError(f"{key} does not hold the rows of group {group.group_id}")

    def _batch(self, batch: Batch) -> None:
        name = layout.batch(batch.content.iteration)
        for segment, digest in batch.content.seals.items():
            if segment not in self._seals or self._seals[segment][0] != digest:
                self.problems.append(f"{name} names a seal of segment {segment} that is not there")
        sealed = {
            (segment, *place): digest
            for segment in batch.content.seals
            if segment in self._seals
            for groups in self._seals[segment][1].values()
            for place, digest in groups.items()
        }
        for group in batch.content.groups:
            if sealed.get((group.segment, group.group_id, group.attempt)) != group.digest:
                self.problems.append(
                    f"{name} names rows of group {group.group_id} that were not sealed"
                )
