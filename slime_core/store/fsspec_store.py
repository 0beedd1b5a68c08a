"""The five verbs on Google Cloud Storage and Azure, through the file systems that fsspec has there.

An object is created under the precondition that there is none: `ifGenerationMatch=0` at Google,
`If-None-Match: *` at Azure. Both clients send it for the mode `create`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import fsspec

from slime_core.errors import (
    AccessError,
    ConfigError,
    LostRaceError,
    MissingError,
    SlimeError,
    StoreError,
    UnavailableError,
)
from slime_core.store.backend import Data, Entry, check_key
from slime_core.store.retries import retried

T = TypeVar("T")
PATIENCE_S = 60.0
EXISTS = (409, 412)
REFUSED = (401, 403)
PASSING = (408, 425, 429)
TIMES = ("mtime", "LastModified", "last_modified", "updated")


class FsspecBackend:
    """Objects of a bucket or container below a prefix."""

    clock_resolution_s = 1.0

    def __init__(self, url: str, patience_s: float | None = None) -> None:
        """
        Args:
            url: scheme://bucket/prefix; keys and address come from fsspec's configuration for the
                scheme, else from the client's own environment.
            patience_s: how long one call may be tried again.

        Raises:
            ConfigError: no bucket.
            ImportError: the client is not installed.
        """
        parts = urlsplit(url)
        if not parts.netloc:
            raise ConfigError(f"store {url}: name a bucket, as in {parts.scheme}://bucket/prefix")
        self._root = f"{parts.netloc}/{unquote(parts.path).strip('/')}".rstrip("/")
        self.url = f"{parts.scheme}://{self._root}"
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        # An instance of its own: a cached one would keep credentials that were renewed since.
        self._files: Any = fsspec.filesystem(
            parts.scheme, use_listings_cache=False, skip_instance_cache=True
        )

    def put_new(self, key: str, data: Data) -> None:
        path, content = self._path(key), bytes(memoryview(data).cast("B"))
        try:
            self._retried(key, lambda: self._files.pipe_file(path, content, mode="create"))
        except LostRaceError:
            # Clients ask again by themselves: an attempt whose answer never came may have been the
            # one that created the object.
            if self.get(key) != content:
                raise

    def get(self, key: str) -> bytes:
        path = self._path(key)
        return self._retried(key, lambda: self._files.cat_file(path))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        path = self._path(key)
        size = self._retried(key, lambda: int(self._files.info(path)["size"]))
        end = min(start + length, size)
        if start >= end:
            return b""
        return self._retried(key, lambda: self._files.cat_file(path, start=start, end=end))

    def list(self, prefix: str = "") -> list[Entry]:
        folder = f"{self._root}/{prefix.rpartition('/')[0]}".rstrip("/")

        def attempt() -> dict[str, dict[str, Any]]:
            self._files.invalidate_cache()
            return self._files.find(folder, detail=True)

        try:
            found = self._retried(prefix, attempt)
        except MissingError:
            return []
        cut = len(self._root) + 1
        entries = [
            Entry(name[cut:], int(info["size"]), _modified_s(info))
            for name, info in found.items()
            if info.get("type") == "file" and name[cut:].startswith(prefix)
        ]
        return sorted(entries, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            self._retried(key, lambda: self._files.rm_file(path))
        except MissingError:
            return

    def local_path(self, key: str) -> Path | None:
        return None

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _retried(self, key: str, action: Callable[[], T]) -> T:
        caught = (Exception,)  # each client has exceptions of its own
        return retried(f"{self.url}/{key}", self._patience_s, action, caught, _translate)


def _translate(error: Exception, name: str) -> SlimeError:
    """The error that callers see; UnavailableError if another attempt may help."""
    status = next((code for code in _statuses(error) if code), 0)
    if isinstance(error, FileExistsError) or status in EXISTS:
        return LostRaceError(f"{name} exists already")
    if isinstance(error, FileNotFoundError) or status == 404:
        return MissingError(f"{name} is not there")
    forbidden = str(error).startswith("Forbidden")  # all that gcsfs says of a 403
    if isinstance(error, PermissionError) or status in REFUSED or forbidden:
        return AccessError(f"{name}: the server refuses these credentials ({error}): renew them")
    if 400 <= status < 500 and status not in PASSING:
        return StoreError(f"{name}: {error}")
    if isinstance(error, (ValueError, TypeError, AttributeError, NotImplementedError)):
        return StoreError(f"{name}: {type(error).__name__}: {error}")
    return UnavailableError(f"{name}: {type(error).__name__}: {error}")


def _statuses(error: BaseException | None) -> list[int]:
    """HTTP statuses that an error and its causes name."""
    found: list[int] = []
    while error is not None:
        for attribute in ("status_code", "status", "code"):
            value = getattr(error, attribute, None)
            if isinstance(value, (int, str)) and str(value).isdigit():
                found.append(int(value))
        error = error.__cause__
    return found


def _modified_s(info: dict[str, Any]) -> float:
    """The store's own time of writing, by whichever name the client has for it."""
    value = next(info[name] for name in TIMES if info.get(name) is not None)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value.timestamp() if isinstance(value, datetime) else float(value)
