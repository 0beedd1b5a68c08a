"""What a checkpoint folder contains, and whether it still does. Imports no torch, no megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from slime_core.errors import DigestError
from slime_core.refs import digest_of

_READ_BYTES = 1 << 22


def directory_digest(directory: str | Path) -> dict[str, Any]:
    """Names, sizes and hashes of all files below a folder, and one digest over them.

    Returns:
        {"files": {relative name: {"bytes": int, "xxh3": 32 hex}}, "bytes": int, "digest": str}.
    """
    root = Path(directory)
    files = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        hasher = xxhash.xxh3_128()
        with path.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                hasher.update(block)
        files[path.relative_to(root).as_posix()] = {
            "bytes": path.stat().st_size,
            "xxh3": hasher.hexdigest(),
        }
    total = sum(row["bytes"] for row in files.values())
    return {"files": files, "bytes": total, "digest": digest_of(files)}


def verify_directory(directory: str | Path, expected: dict[str, Any]) -> None:
    """Compares a folder with what `directory_digest` said of it.

    Raises:
        DigestError: names a file that is missing, added or changed.
    """
    found = directory_digest(directory)["files"]
    wanted = expected["files"]
    for name in sorted(set(found) | set(wanted)):
        if found.get(name) != wanted.get(name):
            state = (
                "is missing"
                if name not in found
                else "was not there when the folder was sealed"
                if name not in wanted
                else "has changed"
            )
            raise DigestError(f"{Path(directory) / name} {state}; do not load this folder")
