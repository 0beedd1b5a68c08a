"""Where the run of a case stores, and how one looks there from outside."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol

from pyarrow import fs

RUN_ID = "killed"
BUCKET = "runs"
USER, SECRET, REGION = "tester", "secret", "us-east-1"
END_S = 10.0


class Place(Protocol):
    """A store."""

    flags: tuple[str, ...]
    environment: dict[str, str]

    def has(self, key: str) -> bool:
        """Whether the run has this object."""
        ...

    def folder(self) -> Path:
        """The run's objects as files, as they are now."""
        ...


class FilePlace(AbstractContextManager["FilePlace"]):
    """The store in the workspace."""

    def __init__(self, workspace: Path) -> None:
        self.flags: tuple[str, ...] = ()
        self.environment: dict[str, str] = {}
        self._run = workspace / "store" / RUN_ID

    def has(self, key: str) -> bool:
        return (self._run / key).is_file()

    def folder(self) -> Path:
        return self._run

    def __exit__(self, *_: object) -> None:
        return None


class S3Place(AbstractContextManager["S3Place"]):
    """A bucket of a server of its own (moto's), in a process of its own."""

    def __init__(self, workspace: Path) -> None:
        self._mirror = workspace / "mirror"
        self._server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kill_matrix.s3_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        address = self._server.stdout.readline().strip()
        if not address:
            raise RuntimeError("moto's S3 server did not start; its words stand above")
        self._files = fs.S3FileSystem(
            access_key=USER,
            secret_key=SECRET,
            region=REGION,
            scheme="http",
            endpoint_override=address,
            allow_bucket_creation=True,
        )
        self._files.create_dir(BUCKET)
        self.flags: tuple[str, ...] = ("--store-url", f"s3://{BUCKET}/team")
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{address}",
            "AWS_ACCESS_KEY_ID": USER,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._run = f"{BUCKET}/team/{RUN_ID}"

    def has(self, key: str) -> bool:
        return self._files.get_file_info(f"{self._run}/{key}").type == fs.FileType.File

    def folder(self) -> Path:
        shutil.rmtree(self._mirror, ignore_errors=True)
        self._mirror.mkdir(parents=True)
        selector = fs.FileSelector(self._run, allow_not_found=True, recursive=True)
        for entry in self._files.get_file_info(selector):
            key = entry.path.removeprefix(f"{self._run}/")
            if entry.type != fs.FileType.File or key.startswith(("epochs/", "checkpoints/")):
                continue  # nothing to audit, and signs of life come and go
            to = self._mirror / key
            to.parent.mkdir(parents=True, exist_ok=True)
            with self._files.open_input_stream(entry.path) as source:
                to.write_bytes(source.read())
        return self._mirror

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.kill()
        self._server.communicate(timeout=END_S)


def open_place(store: str, workspace: Path) -> FilePlace | S3Place:
    """A new place; use it as a context."""
    return S3Place(workspace) if store == "s3" else FilePlace(workspace)


def missing_for(store: str) -> list[str]:
    """Packages that cases on this store need and that are not here."""
    needed = ("moto", "s3fs", "werkzeug") if store == "s3" else ()
    return [name for name in needed if importlib.util.find_spec(name) is None]
