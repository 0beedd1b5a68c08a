"""Finds out whether a store keeps its one promise: of two writers of a key, one wins."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from slime_core.errors import LostRaceError, StoreError
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.file_errors import trouble

PROBE_BYTES = 2**20
"""Enough to find a disk that is as good as full."""


def check_create_only(backend: Backend) -> None:
    """Lets two writers race for one new object, then lets a third one come late.

    Some servers that speak S3 take no notice of `If-None-Match` and overwrite: on those, two
    owners of a run would destroy each other's work.

    Raises:
        StoreError: not exactly one writer won; the store cannot hold a run.
    """
    key = f"{layout.EPOCHS}create-{uuid.uuid4().hex}"

    def write(name: bytes) -> bool:
        try:
            backend.put_new(key, name)
        except LostRaceError:
            return False
        return True

    try:
        with ThreadPoolExecutor(2, "create-race") as pool:
            won = [*pool.map(write, (b"first", b"second")), write(b"late")]
    finally:
        backend.delete(key)
    if won.count(True) != 1 or won[2]:
        raise StoreError(
            f"{backend.url} let {won.count(True)} writers create one object: this server takes no "
            "notice of If-None-Match, so a run cannot be kept there; use another store"
        )


def check_usable(backend: Backend) -> None:
    """Writes an object, reads it and removes it.

    Raises:
        AwayError: the store cannot be used yet.
    """
    key = f"{layout.EPOCHS}probe-{uuid.uuid4().hex}"
    content = bytes(PROBE_BYTES)
    backend.put_new(key, content)
    try:
        if backend.get(key) != content:
            raise StoreError(f"{backend.url}/{key} holds something else than was just written")
    finally:
        backend.delete(key)


def check_room(folder: Path) -> None:
    """Writes a file into a folder of this machine and removes it.

    Raises:
        AwayError: the disk is full, or does not answer.
    """
    path = folder / f"probe-{uuid.uuid4().hex}"
    try:
        path.write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        raise trouble(error, path) from error
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
