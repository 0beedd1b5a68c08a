"""Bytes of stored objects near the process: mapped where they lie, or fetched once a node."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa

from slime_core.errors import MissingError, StoreError
from slime_core.store.backend import Backend, Data
from slime_core.store.file_errors import trouble


class NodeCache:
    """Reads objects of a run. Those of a local store are mapped in place.

    Others are kept below a directory that all processes of a node share and that may be deleted
    at any time. Objects never change, so what is there is right.
    """

    def __init__(self, backend: Backend, directory: Path | None = None) -> None:
        self.backend = backend
        self.directory = directory

    def read(self, key: str) -> pa.Buffer:
        """The whole object, mapped if it is a file.

        Raises:
            MissingError: there is none.
        """
        path = self.backend.local_path(key)
        if path is not None:
            return _mapped(path)
        if self.directory is None:
            return pa.py_buffer(self.backend.get(key))
        path = self.directory / key
        if not path.exists():
            self._keep(path, self.backend.get(key))
        return _mapped(path)

    def keep(self, key: str, data: Data | pa.Buffer) -> None:
        """Keeps what was just written, so that it need not be fetched here."""
        if self.directory is not None and self.backend.local_path(key) is None:
            self._keep(self.directory / key, memoryview(data))

    def forget(self, key: str) -> bool:
        """Drops this node's copy (the stored object stays). True if there was one."""
        if self.directory is None or not (self.directory / key).exists():
            return False
        (self.directory / key).unlink(missing_ok=True)
        return True

    def _keep(self, path: Path, data: Data) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError as error:
            raise trouble(error, path) from error


def _mapped(path: Path) -> pa.Buffer:
    try:
        with pa.memory_map(str(path)) as file:
            return file.read_buffer()
    except FileNotFoundError as error:
        raise MissingError(f"{path} is not there") from error
    except OSError as error:
        raise trouble(error, path, "read") from error
    except pa.ArrowInvalid as error:
        raise StoreError(f"{path} cannot be mapped: {error}") from error
