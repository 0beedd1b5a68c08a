"""Checkpoint manifests: a checkpoint counts once its manifest stands beside its files."""

from __future__ import annotations

import logging
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import DigestError, StoreError
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.digest import checksum
from slime_core.store.documents import Document, Owner, put_document, read_document

log = logging.getLogger(__name__)
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A final checkpoint.

    Attributes:
        iteration: the last iteration it contains.
        epoch: the owner that wrote it.
        state: S of that iteration.
        weight_version: version of its weights.
        about: frontier, configuration digests, tracker id and whatever else the run keeps.
        files: (name below its folder, bytes, xxh3-128).
    """

    iteration: int
    epoch: int
    state: str
    weight_version: str
    about: dict[str, Any]
    files: tuple[tuple[str, int, str], ...]

    @property
    def key(self) -> str:
        return layout.checkpoint(self.iteration, self.epoch)

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size, _ in self.files)


def checkpoint_directory(backend: Backend, iteration: int, epoch: int) -> Path:
    """Where the trainer writes its files. Raises StoreError for a store without directories."""
    path = backend.local_path(layout.checkpoint(iteration, epoch).rstrip("/"))
    if path is None:
        raise StoreError(f"checkpoints on {backend.url} are not there yet; use a local store")
    path.mkdir(parents=True, exist_ok=True)
    return path


def put_manifest(
    backend: Backend,
    owner: Owner,
    *,
    iteration: int,
    state: str,
    weight_version: str,
    about: dict[str, Any],
    by: dict[str, Any] | None = None,
) -> Checkpoint:
    """Makes the files of a checkpoint final, after all ranks have written theirs.

    Raises:
        StoreError: there are no files.
        StaleOwnerError: a newer owner exists.
    """
    directory = checkpoint_directory(backend, iteration, owner.epoch)
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    files = [
        [path.relative_to(directory).as_posix(), path.stat().st_size, _checksum(path)]
        for path in paths
        if path.name != _MANIFEST
    ]
    if not files:
        raise StoreError(f"{directory} holds no files to make a checkpoint of")
    body = {
        "iteration": iteration,
        "state": state,
        "weight_version": weight_version,
        "about": about,
        "files": files,
    }
    key = layout.manifest(iteration, owner.epoch)
    return _checkpoint(put_document(backend, key, body, by, owner=owner), owner.epoch)


def list_checkpoints(backend: Backend) -> list[Checkpoint]:
    """Final checkpoints, newest iteration first, then newest owner.

    One whose manifest is damaged is logged and left out: an older one serves as well.
    """
    names = [layout.parse_manifest(entry.key) for entry in backend.list(layout.CHECKPOINTS)]
    found = []
    for iteration, epoch in sorted((name for name in names if name is not None), reverse=True):
        try:
            document = read_document(backend, layout.manifest(iteration, epoch))
        except DigestError as error:
            log.warning("checkpoint %d is left out: %s", iteration, error)
            continue
        found.append(_checkpoint(document, epoch))
    return found


def verify_checkpoint(backend: Backend, checkpoint: Checkpoint) -> Path:
    """Checks that every file is there and is what was saved; returns the folder.

    Raises:
        DigestError: names the first file that is missing or damaged.
    """
    directory = checkpoint_directory(backend, checkpoint.iteration, checkpoint.epoch)
    for name, size_bytes, digest in checkpoint.files:
        path = directory / name
        if not path.is_file():
            raise DigestError(f"checkpoint file {path} is missing")
        if path.stat().st_size != size_bytes or _checksum(path) != digest:
            raise DigestError(f"checkpoint file {path} is damaged")
    return directory


def _checksum(path: Path) -> str:
    if not path.stat().st_size:
        return checksum(b"")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return checksum(data)


def _checkpoint(document: Document, epoch: int) -> Checkpoint:
    body = document.body
    return Checkpoint(
        iteration=body["iteration"],
        epoch=epoch,
        state=body["state"],
        weight_version=body["weight_version"],
        about=body["about"],
        files=tuple((name, size, digest) for name, size, digest in body["files"]),
    )
