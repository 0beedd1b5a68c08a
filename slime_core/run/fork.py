"""A new run with the history of another one up to an iteration.

Objects never change, so the fork shares them: hard links where both lie on one file system, copies
elsewhere. Deleting either run leaves the other whole.
"""

from __future__ import annotations

import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from slime_core.config.fields import class_of, field_groups
from slime_core.errors import ConfigError, LostRaceError, MissingError
from slime_core.refs import digest_of
from slime_core.run.identity import INDEX
from slime_core.run.replay import trained_chain
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.batch import read_batch
from slime_core.store.cache import NodeCache
from slime_core.store.checkpoints import fetch_checkpoint, list_checkpoints
from slime_core.store.documents import put_document, read_document
from slime_core.store.draws import list_draws, read_draws
from slime_core.store.ledger import Ledger
from slime_core.store.seal import list_dropped

log = logging.getLogger(__name__)
CHANGEABLE = ("run_name", "seed", "n_samples_per_prompt")
"""Identity that a fork may change: nothing stored up to the fork depends on it."""
COPIES = 8


@dataclass(frozen=True)
class Fork:
    """What was made.

    Attributes:
        iterations: trained ones that the fork begins with.
        shared: objects that are hard links.
        copied: objects that were copied.
        checkpoint: iteration of its newest checkpoint, -1 without one: then all is trained again.
    """

    run_id: str
    iterations: int
    shared: int
    copied: int
    checkpoint: int


def fork_run(
    root: Backend,
    source: NodeCache,
    target: Backend,
    *,
    run_id: str,
    at: int,
    changes: dict[str, Any] | None = None,
) -> Fork:
    """Makes run `run_id` from the iterations 0..at of another run.

    The new run is known to others only when it is whole; a fork that was cut off is made again
    with the same command.

    Args:
        root: the store of all runs.
        source: the parent run.
        target: the store below the new run's prefix.
        at: last iteration the fork shares; it needs a ledger.
        changes: identity fields (CHANGEABLE) that are to have another value.

    Raises:
        ConfigError: an iteration that is not trained, a run that exists, a field that cannot
            change.
        DigestError: the parent's history is damaged.
    """
    parent = read_document(source.backend, layout.RUN).body
    chain = refuse_fork(root, source, run_id=run_id, at=at, changes=changes or {})
    keys = _keys_up_to(source, at)
    checkpoints = [
        c for c in list_checkpoints(source.backend)
        if c.iteration <= at and chain[c.iteration].state == c.state
    ][:1]  # fmt: skip
    for checkpoint in checkpoints:
        fetch_checkpoint(source, checkpoint)  # a damaged one is not worth a fork
        keys += [f"{checkpoint.key}{name}" for name, *_ in checkpoint.files]
        keys.append(f"{checkpoint.key}manifest.json")
    shared = sum(_share_all(source, target, keys))
    _close_epochs(target)
    _record(root, target, parent, run_id, at, changes or {})
    newest = checkpoints[0].iteration if checkpoints else -1
    return Fork(run_id, at + 1, shared, len(keys) - shared, newest)


def refuse_fork(
    root: Backend, source: NodeCache, *, run_id: str, at: int, changes: dict[str, Any]
) -> list[Ledger]:
    """Finds out whether a fork can be made; creates nothing. See `fork_run`.

    Returns:
        The parent's ledgers.
    """
    with suppress(MissingError):
        read_document(root, f"{INDEX}{run_id}.json")
        raise ConfigError(f"run {run_id} exists already: choose another --run-id")
    for name in changes:
        if name not in field_groups() or class_of(name) != "identity":
            raise ConfigError(f"{name} is no identity field: change it when you start the fork")
        if name not in CHANGEABLE:
            raise ConfigError(
                f"{name} cannot change in a fork, its history depends on it; "
                f"{', '.join(CHANGEABLE)} can"
            )
    chain = trained_chain(source)
    if not 0 <= at < len(chain):
        parent = read_document(source.backend, layout.RUN).body["run_id"]
        raise ConfigError(
            f"run {parent} has the iterations 0:{len(chain)}; it cannot be forked at {at}"
        )
    _refuse_without_rows(source, chain, at)
    return chain


def _refuse_without_rows(source: NodeCache, chain: list[Ledger], at: int) -> None:
    """A fork trains again what lies between its newest checkpoint and `at`, and needs its rows."""
    gone = list_dropped(source.backend)
    if not gone:
        return
    held = [
        c.iteration for c in list_checkpoints(source.backend)
        if c.iteration < len(chain) and chain[c.iteration].state == c.state
    ]  # fmt: skip
    newest = max((k for k in held if k <= at), default=-1)
    for k in range(newest + 1, at + 1):
        batch = read_batch(source.backend, k)
        if batch is not None and gone & {group.segment for group in batch.content.groups}:
            shown = ", ".join(map(str, sorted(held))) or "none"
            raise ConfigError(
                f"a fork at {at} trains iteration {k} again, whose rows were given up (slime gc): "
                f"fork at an iteration with a checkpoint ({shown})"
            )


def _keys_up_to(source: NodeCache, at: int) -> list[str]:
    """Everything of segments and iterations up to `at`, and the draws they come from."""
    keys = [
        e.key for prefix in (layout.CONFIGS, layout.EPOCHS) for e in source.backend.list(prefix)
    ]
    numbers = list_draws(source.backend)
    last = -1
    for seq in numbers:
        if any(draw.segment <= at for draw in read_draws(source, seq, samples=False)):
            last = seq
    keys += [layout.draws(seq) for seq in range(last + 1)]
    for prefix in (layout.GROUPS, layout.ITERATIONS):
        for entry in source.backend.list(prefix):
            if int(entry.key.split("/")[1]) <= at:
                keys.append(entry.key)
    for entry in source.backend.list(layout.EVALS):
        version = entry.key.split("/")[1].rpartition("-")[2]
        if version.isdigit() and int(version) <= at + 1:
            keys.append(entry.key)
    return [key for key in keys if ".alive-" not in key]


def _share_all(source: NodeCache, target: Backend, keys: list[str]) -> list[bool]:
    """True for each object that could be linked."""
    with ThreadPoolExecutor(COPIES, "fork") as pool:
        return list(pool.map(lambda key: _share(source, target, key), keys))


def _share(source: NodeCache, target: Backend, key: str) -> bool:
    here, there = source.backend.local_path(key), target.local_path(key)
    if here is not None and there is not None:
        there.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(here, there)
            return True
        except FileExistsError:
            return True  # of a fork that was cut off
        except OSError as error:
            log.info("%s is copied, it cannot be linked: %s", key, error)
    path = source.directory / key if source.directory is not None else None
    with suppress(LostRaceError):
        if path is not None and key.startswith(layout.CHECKPOINTS) and path.is_file():
            _put_file(target, key, path)  # it was fetched and verified a moment ago
        else:
            target.put_new(key, source.backend.get(key))
    return False


def _put_file(target: Backend, key: str, path: Any) -> None:
    if not path.stat().st_size:
        target.put_new(key, b"")
        return
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        target.put_new(key, view)


def _close_epochs(target: Backend) -> None:
    """The parent's owner does not own the fork; later ones count on, so no name is used twice."""
    epochs = [
        found[0]
        for entry in target.list(layout.EPOCHS)
        if (found := layout.parse_epoch(entry.key)) is not None and found[1] == "owner"
    ]
    if epochs:
        put_document(target, layout.ended(max(epochs)), {"epoch": max(epochs)}, keep_first=True)


def _record(
    root: Backend, target: Backend, parent: dict[str, Any], run_id: str, at: int,
    changes: dict[str, Any],
) -> None:  # fmt: skip
    identity = parent["identity"] | changes
    body = {
        **parent,
        "run_id": run_id,
        "identity": identity,
        "identity_digest": digest_of(identity),
        "fork": {"run_id": parent["run_id"], "at": at},
    }
    by = {"created": datetime.now(UTC).isoformat()}
    known = put_document(target, layout.RUN, body, by)
    put_document(root, f"{INDEX}{run_id}.json", known.body, known.by)
