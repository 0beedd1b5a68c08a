"""Reading files at URLs (http, https, s3) through fsspec, and plain paths as they are."""

from __future__ import annotations

import io
import shutil
import tempfile
import threading
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import fsspec

from slime_core.errors import DataError

SCHEMES = ("http", "https", "s3")
CHUNK_BYTES = 4 << 20
CONNECT_S, READ_S = 20.0, 120.0


def open_stream(path: str) -> IO[bytes]:
    """Opens a path or URL for one pass from its beginning; nothing is kept.

    Raises:
        DataError: an unknown scheme, or nobody answers; names the URL.
    """
    if "://" not in path:
        return Path(path).open("rb")
    scheme = urlsplit(path).scheme
    if scheme not in SCHEMES:
        raise DataError(f"{path}: {scheme}:// cannot be read; use {', '.join(SCHEMES)} or a path")
    try:
        opened: Any = fsspec.open(path, "rb", **_options(scheme))
        file = opened.open()
        return io.BufferedReader(file, CHUNK_BYTES)
    except ImportError as error:
        raise DataError(f"{path}: {error}; pip install 'slime-flow[s3]'") from error
    except Exception as error:  # each file system has exceptions of its own
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


class Fetched:
    """Opens URLs from local copies that vanish with the process, each fetched once."""

    def __init__(self) -> None:
        self._copies: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __call__(self, path: str) -> IO[bytes]:
        """Opens a path, or a URL's copy.

        Raises:
            DataError: the URL cannot be read.
        """
        if "://" not in path:
            return Path(path).open("rb")
        with self._lock:
            if path not in self._copies:
                self._copies[path] = _fetch(path)
            return Path(self._copies[path].name).open("rb")


def _fetch(url: str) -> Any:
    copy = tempfile.NamedTemporaryFile(prefix="slime-prompts-")  # noqa: SIM115
    try:
        with open_stream(url) as source:
            shutil.copyfileobj(source, copy, CHUNK_BYTES)
        copy.flush()
    except DataError:
        copy.close()
        raise
    except Exception as error:  # each file system has exceptions of its own
        copy.close()
        raise DataError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
    return copy


def _options(scheme: str) -> dict[str, Any]:
    """Deadlines of a connection and of each read."""
    if scheme == "s3":
        return {"config_kwargs": {"connect_timeout": CONNECT_S, "read_timeout": READ_S}}
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S)
    return {"client_kwargs": {"timeout": timeout}}
