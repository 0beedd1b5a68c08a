"""Checkpoints: one counts once its manifest stands beside its files.

The trainer always writes and reads a folder. A local store holds that folder itself; for any other
store it lies in the node cache and its files are uploaded before, or fetched after.
"""

from __future__ import annotations

import logging
import mmap
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from slime_core.errors import DigestError, MissingError, StoreError
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.cache import NodeCache
from slime_core.store.digest import checksum
from slime_core.store.documents import Document, Owner, put_document, read_document
from slime_core.store.file_errors import trouble

log = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_PLACE = layout.CHECKPOINTS.rstrip("/")
TRANSFERS = 4
RANGE_BYTES = 32 * 2**20


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


def checkpoint_directory(cache: NodeCache, iteration: int, epoch: int) -> Path:
    """The folder that the trainer makes and fills; what an earlier attempt left is removed.

    Raises:
        StoreError: the store has no folders, and there is no node cache; or its disk is full.
    """
    path = _folder(cache, iteration, epoch)
    try:
        if path.exists():
            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise trouble(error, path) from error
    return path


def put_checkpoint(
    cache: NodeCache,
    owner: Owner,
    *,
    iteration: int,
    state: str,
    weight_version: str,
    about: dict[str, Any],
    by: dict[str, Any] | None = None,
) -> Checkpoint:
    """Uploads the files of a checkpoint where need be and makes them final, after all ranks have
    written theirs.

    Raises:
        StoreError: there are no files.
        StaleOwnerError: a newer owner exists.
    """
    directory = _folder(cache, iteration, owner.epoch)
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    files = [
        [path.relative_to(directory).as_posix(), path.stat().st_size, _checksum(path)]
        for path in paths
        if path.name != _MANIFEST
    ]
    if not files:
        raise StoreError(f"{directory} holds no files to make a checkpoint of")
    if not _holds_folders(cache.backend):
        _upload(cache.backend, layout.checkpoint(iteration, owner.epoch), directory, files)
    body = {
        "iteration": iteration,
        "state": state,
        "weight_version": weight_version,
        "about": about,
        "files": files,
    }
    key = layout.manifest(iteration, owner.epoch)
    return _checkpoint(put_document(cache.backend, key, body, by, owner=owner), owner.epoch)


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


def fetch_checkpoint(cache: NodeCache, checkpoint: Checkpoint) -> Path:
    """Brings the files to this node where need be; returns their folder, verified.

    Raises:
        DigestError: names the first file that is missing or damaged.
    """
    directory = _folder(cache, checkpoint.iteration, checkpoint.epoch)
    if _holds_folders(cache.backend):
        for name, size_bytes, digest in checkpoint.files:
            _check_file(directory / name, size_bytes, digest)
        return directory

    def bring(file: tuple[str, int, str]) -> None:
        name, size_bytes, digest = file
        path = directory / name
        if not path.is_file() or path.stat().st_size != size_bytes or _checksum(path) != digest:
            _download(cache.backend, f"{checkpoint.key}{name}", path, size_bytes)
            _check_file(path, size_bytes, digest)

    with ThreadPoolExecutor(TRANSFERS, "checkpoint") as pool:
        list(pool.map(bring, checkpoint.files))
    return directory


def verify_checkpoint(cache: NodeCache, checkpoint: Checkpoint) -> None:
    """Checks that the store holds every file as it was saved; keeps nothing of a remote one.

    Raises:
        DigestError: names the first file that is missing or damaged, or that nobody saved.
    """
    saved = {f"{checkpoint.key}{name}" for name in (_MANIFEST, *(f[0] for f in checkpoint.files))}
    for entry in cache.backend.list(checkpoint.key):
        if entry.key not in saved:
            raise DigestError(f"{entry.key} is no file of its checkpoint's manifest")
    if _holds_folders(cache.backend):
        fetch_checkpoint(cache, checkpoint)
        return
    with TemporaryDirectory(prefix="slime-verify-") as folder:
        for name, size_bytes, digest in checkpoint.files:
            path = Path(folder, "file")
            _download(cache.backend, f"{checkpoint.key}{name}", path, size_bytes)
            _check_file(path, size_bytes, digest, f"{cache.backend.url}/{checkpoint.key}{name}")


def remove_checkpoint(cache: NodeCache, name: str) -> None:
    """Removes a checkpoint, its manifest first, so that half of it never counts.

    Args:
        name: its folder's, `<iteration>-<epoch>`.
    """
    prefix = f"{layout.CHECKPOINTS}{name}/"
    cache.backend.delete(f"{prefix}{_MANIFEST}")
    for entry in cache.backend.list(prefix):
        cache.backend.delete(entry.key)
    folder = cache.backend.local_path(prefix.rstrip("/"))
    if folder is None and cache.directory is not None:
        folder = cache.directory / prefix
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def checkpoint_names(cache: NodeCache) -> set[str]:
    """Folders of checkpoints, final or not, in the store and on this node."""
    found = {entry.key.split("/")[1] for entry in cache.backend.list(layout.CHECKPOINTS)}
    for place in (cache.backend.local_path(_PLACE), cache.directory and cache.directory / _PLACE):
        if place is not None and place.is_dir():
            found |= {folder.name for folder in place.iterdir()}
    return found


def _holds_folders(backend: Backend) -> bool:
    return backend.local_path(_PLACE) is not None


def _folder(cache: NodeCache, iteration: int, epoch: int) -> Path:
    key = layout.checkpoint(iteration, epoch).rstrip("/")
    path = cache.backend.local_path(key)
    if path is not None:
        return path
    if cache.directory is None:
        raise StoreError(f"checkpoints on {cache.backend.url} need a node cache, a local folder")
    return cache.directory / key


def _upload(backend: Backend, prefix: str, directory: Path, files: list[list[Any]]) -> None:
    """Uploads the files; what an earlier attempt of this owner left there is removed first."""
    for entry in backend.list(prefix):
        backend.delete(entry.key)

    def send(file: list[Any]) -> None:
        name, size_bytes, _ = file
        if not size_bytes:
            backend.put_new(f"{prefix}{name}", b"")
            return
        with (
            (directory / name).open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            backend.put_new(f"{prefix}{name}", view)

    with ThreadPoolExecutor(TRANSFERS, "checkpoint") as pool:
        list(pool.map(send, files))


def _download(backend: Backend, key: str, path: Path, size_bytes: int) -> None:
    """Fetches an object in ranges, so that its size does not matter to memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("wb") as file:
            for start in range(0, size_bytes, RANGE_BYTES):
                file.write(backend.get_range(key, start, min(RANGE_BYTES, size_bytes - start)))
    except MissingError as error:
        path.unlink()
        raise DigestError(f"checkpoint file {backend.url}/{key} is missing") from error
    except OSError as error:
        raise trouble(error, path) from error


def _check_file(path: Path, size_bytes: int, digest: str, name: str = "") -> None:
    if not path.is_file():
        raise DigestError(f"checkpoint file {name or path} is missing")
    if path.stat().st_size != size_bytes or _checksum(path) != digest:
        raise DigestError(f"checkpoint file {name or path} is damaged")


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
