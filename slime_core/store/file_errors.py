"""What goes wrong with files, as one named error each."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from slime_core.errors import AccessError, FullError, StoreError, UnavailableError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN)
_NO_LINKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)


def trouble(error: OSError, path: Path, doing: str = "written") -> StoreError:
    """Says in one sentence what the operating system refused and what would help."""
    if error.errno in _FULL:
        return FullError(
            f"no space left to write {path}; free some or move the store (--store-url)"
        )
    if error.errno in _REFUSED:
        return AccessError(
            f"{path} cannot be {doing} by user id {os.geteuid()} ({error.strerror}); "
            "change its permissions or choose another store (--store-url)"
        )
    if error.errno in _AWAY:
        return UnavailableError(f"the file system of {path} does not answer ({error.strerror})")
    if error.errno in _NO_LINKS:
        return StoreError(f"the file system of {path} has no hard links; choose another store")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return StoreError(f"{path} is below something that is a file, not a directory")
    return StoreError(f"{path}: {error.strerror or error}")


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk stands behind an error, however far."""
    while error is not None:
        if isinstance(error, FullError) or (isinstance(error, OSError) and error.errno in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False
