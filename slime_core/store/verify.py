"""Reads everything a run stores and checks it against what was signed."""

from __future__ import annotations

from collections.abc import Callable

from slime_core.errors import SlimeError, StoreError
from slime_core.store import layout
from slime_core.store.batch import read_batch
from slime_core.store.cache import NodeCache
from slime_core.store.checkpoints import list_checkpoints, verify_checkpoint
from slime_core.store.digest import rows_digest
from slime_core.store.documents import read_document
from slime_core.store.draws import list_draws, read_draws
from slime_core.store.ledger import unbroken_chain
from slime_core.store.load import load_groups
from slime_core.store.parts import open_part


def verify_run(cache: NodeCache, start: str | None = None) -> list[str]:
    """Checks every part, its rows, every document, the chain and the checkpoints.

    Args:
        start: S_-1; without it the chain is not followed.

    Returns:
        One sentence for each thing that is wrong; nothing is moved or changed.
    """
    problems: list[str] = []
    for entry in cache.backend.list():
        try:
            _verify_object(cache, entry.key)
        except SlimeError as error:
            problems.append(str(error))
    checks: list[Callable[[], object]] = [
        lambda: [read_draws(cache, seq, samples=False) for seq in list_draws(cache.backend)]
    ]
    if start is not None:
        checks.append(lambda: unbroken_chain(cache.backend, start))
    checks += [
        lambda checkpoint=checkpoint: verify_checkpoint(cache, checkpoint)
        for checkpoint in list_checkpoints(cache.backend)
    ]
    for check in checks:
        try:
            check()
        except SlimeError as error:
            problems.append(str(error))
    return problems


def _verify_object(cache: NodeCache, key: str) -> None:
    if key.startswith(layout.QUARANTINE):
        return
    if layout.parse_part(key) is not None:
        file = open_part(cache, key)
        for group in file.part.groups:
            if rows_digest(file.rows(group.batch).rows) != group.digest:
                raise StoreError(f"{key} does not hold the rows of group {group.group_id} it names")
    elif layout.parse_iteration(key) is not None and key.endswith("batch.json"):
        batch = read_batch(cache.backend, int(key.split("/")[1]))
        if batch is not None:
            load_groups(cache, batch.content)
    elif layout.parse_manifest(key) is not None or (
        key.endswith(".json") and not key.startswith(layout.CHECKPOINTS)
    ):
        read_document(cache.backend, key)
