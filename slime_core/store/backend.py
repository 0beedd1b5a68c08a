"""Five verbs over an object store. Whatever is written is created once and never changed.

`put_new` is atomic: of any number of writers of one key exactly one creates the object, whole, and
every other gets LostRaceError. Keys are relative, with `/` between parts.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from slime_core.errors import ConfigError, LostRaceError, MissingError, StoreError
from slime_core.store.file_errors import trouble

Data = bytes | bytearray | memoryview
_EXTRAS = {"gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_TEMPORARY = ".tmp"
_ABANDONED_S = 3600.0


@dataclass(frozen=True)
class Entry:
    """One object of a listing; `modified_s` is the store's own time of writing (Unix seconds)."""

    key: str
    size_bytes: int
    modified_s: float


class Backend(Protocol):
    """What the rest of the store needs from a place that holds objects."""

    url: str
    clock_resolution_s: float
    """How far `modified_s` may lie before the true time of writing."""

    def put_new(self, key: str, data: Data) -> None:
        """Creates an object. Raises LostRaceError if the key is taken, StoreError on trouble."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object. Raises MissingError."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`, fewer at the object's end. Raises MissingError."""
        ...

    def list(self, prefix: str = "") -> list[Entry]:
        """All objects whose key starts with `prefix`, sorted by key."""
        ...

    def delete(self, key: str) -> None:
        """Removes an object; one that is not there is no error."""
        ...

    def local_path(self, key: str) -> Path | None:
        """Where this machine can map the object (or keep a directory) itself, else None."""
        ...


def open_backend(
    url: str, *, fsync: bool = False, read_only: bool = False, patience_s: float | None = None
) -> Backend:
    """Opens the store at a URL or a plain path.

    Args:
        url: `file:///path`, a path, `s3://bucket/prefix`, also gs and az, or `memory://` (a new,
            private one).
        fsync: force files and directories to the disk before `put_new` returns, so that what was
            acknowledged also survives a power cut. A killed process loses nothing without it.
        read_only: create nothing, also no folder, so that reading is enough of a right.
        patience_s: how long a call to a remote store that is away is tried again (default 60).

    Raises:
        ConfigError: a scheme that is unknown, or whose client is not installed.
        StoreError: a directory that cannot be written.
    """
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return MemoryBackend()
    if parts.scheme == "file":
        return FileBackend(Path(unquote(parts.path)), fsync=fsync, read_only=read_only)
    if "://" not in url:
        return FileBackend(Path(url), fsync=fsync, read_only=read_only)
    if parts.scheme == "s3":
        try:
            from slime_core.store.s3 import S3Backend
        except ImportError as error:
            raise ConfigError(
                f"store {url}: s3:// needs the extra: pip install 'slime-flow[s3]'"
            ) from error
        return S3Backend(url, patience_s=patience_s)
    if parts.scheme in _EXTRAS:
        from slime_core.store.fsspec_store import FsspecBackend

        try:
            return FsspecBackend(url, patience_s)
        except ImportError as error:
            raise ConfigError(
                f"store {url}: {parts.scheme}:// needs the extra: pip install "
                f"'slime-flow[{_EXTRAS[parts.scheme]}]'"
            ) from error
    raise ConfigError(
        f"store {url}: unknown scheme {parts.scheme}://; use s3://, gs://, az:// or a path"
    )


def join_url(url: str, *names: str) -> str:
    """The URL of something below another, for example of a run below its store."""
    return "/".join([url.rstrip("/"), *names])


class MemoryBackend:
    """Objects in this process, for tests."""

    clock_resolution_s = 0.0

    def __init__(self) -> None:
        self.url = "memory://"
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def put_new(self, key: str, data: Data) -> None:
        check_key(key)
        with self._lock:
            if key in self._objects:
                raise LostRaceError(f"{self.url}{key} exists already")
            self._objects[key] = (bytes(data), time.time())

    def get(self, key: str) -> bytes:
        with self._lock:
            if key not in self._objects:
                raise MissingError(f"{self.url}{key} is not there")
            return self._objects[key][0]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def list(self, prefix: str = "") -> list[Entry]:
        with self._lock:
            return [
                Entry(key, len(data), modified_s)
                for key, (data, modified_s) in sorted(self._objects.items())
                if key.startswith(prefix)
            ]

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)

    def local_path(self, key: str) -> Path | None:
        return None


class FileBackend:
    """Objects as files below a directory.

    An object is written to a private temporary file and then hard-linked to its name: the link
    either creates the name with the whole content or fails, also between machines on NFS.
    """

    clock_resolution_s = 0.0

    def __init__(self, root: Path, *, fsync: bool = False, read_only: bool = False) -> None:
        self.root = root.expanduser().absolute()
        self.url = self.root.as_uri()
        self._root_prefix = f"{self.root}/"
        self._fsync = fsync
        self._read_only = read_only
        self._temporary = self.root / _TEMPORARY
        self._serial = itertools.count()
        self._prefix = f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
        self._known_directories: set[Path] = set()
        if read_only:
            return
        try:
            self._make_directory(self._temporary)
            self._sweep()
        except OSError as error:
            raise trouble(error, self.root) from error
        if not os.access(self._temporary, os.W_OK | os.X_OK):
            raise trouble(PermissionError(errno.EACCES, "no write permission"), self.root)

    def put_new(self, key: str, data: Data) -> None:
        target = self.root / check_key(key)
        self._refuse_if_read_only(target)
        temporary = self._temporary / f"{self._prefix}-{os.getpid()}-{next(self._serial)}"
        try:
            self._make_directory(target.parent)
            self._write(temporary, data)
        except OSError as error:
            raise trouble(error, target) from error
        try:
            os.link(temporary, target)
            if self._fsync:
                _sync_directory(target.parent)
        except FileExistsError as error:
            raise LostRaceError(f"{target} exists already") from error
        except OSError as error:
            raise trouble(error, target) from error
        finally:
            temporary.unlink()

    def get(self, key: str) -> bytes:
        path = self.root / check_key(key)
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise MissingError(f"{path} is not there") from error
        except OSError as error:
            raise trouble(error, path, "read") from error

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self.root / check_key(key)
        try:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(length)
        except FileNotFoundError as error:
            raise MissingError(f"{path} is not there") from error
        except OSError as error:
            raise trouble(error, path, "read") from error

    def list(self, prefix: str = "") -> list[Entry]:
        folder = prefix.rpartition("/")[0]
        try:
            found = [
                entry for entry in self._walk(self.root / folder) if entry.key.startswith(prefix)
            ]
        except OSError as error:
            raise trouble(error, self.root / folder, "read") from error
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        path = self.root / check_key(key)
        self._refuse_if_read_only(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise trouble(error, path) from error

    def local_path(self, key: str) -> Path | None:
        return self.root / check_key(key)

    def _refuse_if_read_only(self, path: Path) -> None:
        if self._read_only:
            raise StoreError(f"{path}: this store was opened for reading only")

    def _walk(self, folder: Path) -> Iterator[Entry]:
        """Files below a folder; one that goes while we look is left out."""
        try:
            with os.scandir(folder) as items:
                found = list(items)
        except (FileNotFoundError, NotADirectoryError):
            return
        for item in found:
            if item.is_dir(follow_symlinks=False):
                if item.path != self._root_prefix + _TEMPORARY:
                    yield from self._walk(Path(item.path))
                continue
            try:
                status = item.stat()
            except FileNotFoundError:
                continue
            key = item.path[len(self._root_prefix) :]
            yield Entry(key, status.st_size, status.st_mtime)

    def _write(self, path: Path, data: Data) -> None:
        view = memoryview(data).cast("B")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            written = 0
            while written < len(view):
                written += os.write(descriptor, view[written:])
            if self._fsync:
                os.fsync(descriptor)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        """Removes what killed writers left; nobody writes one object for an hour."""
        for path in self._temporary.iterdir():
            with suppress(FileNotFoundError):  # another process sweeps, too
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()

    def _make_directory(self, path: Path) -> None:
        """Makes a directory at its first use; its name is then as durable as its files."""
        if path in self._known_directories:
            return
        if path != self.root:
            self._make_directory(path.parent)
        path.mkdir(parents=True, exist_ok=True)
        if self._fsync:
            _sync_directory(path.parent)
        self._known_directories.add(path)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_key(key: str) -> str:
    """Returns the key. Raises StoreError for one that could leave its store."""
    if not key or key.startswith("/") or any(p in ("", ".", "..") for p in key.split("/")):
        raise StoreError(f"{key!r} is not a key: use relative names joined by /")
    return key
