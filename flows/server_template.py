"""A database with Prefect's tables for new workspaces: its hundred migrations take eight seconds of
CPU, a copy of what they made takes none.

The template holds what the migrations made and nothing else: it is taken before the server has
written a row. Whatever is wrong with it, the server makes its tables itself.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

log = logging.getLogger(__name__)


def template_path() -> Path:
    """Where this user's template for the installed version of Prefect is, or will be.

    Raises:
        RuntimeError: there is no home folder.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(chosen) if Path(chosen).is_absolute() else Path.home() / ".cache"
    return caches / "slime-flow" / f"prefect-{version('prefect')}.db"


def lay_template(database: Path) -> bool:
    """Copies the template to a workspace that has no database yet.

    Returns:
        Whether the tables are there now, of a template or from before.
    """
    if database.exists():
        return True
    try:
        template = template_path()
        if not template.is_file():
            return False
        # A second command of the workspace may have made it meanwhile, and may be using it.
        _copy(template, database, os.link)
    except FileExistsError:
        return True
    except (OSError, RuntimeError, sqlite3.Error) as error:
        log.warning("Prefect's tables are made anew, since their template failed: %s", error)
        return False
    return True


def keep_template(database: Path) -> None:
    """Keeps a database, to which nothing but the migrations has written, as the template."""
    try:
        template = template_path()
        template.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _copy(database, template, os.replace)
    except (OSError, RuntimeError, sqlite3.Error) as error:
        log.warning("no template of Prefect's tables was kept: %s", error)


def _copy(source: Path, target: Path, put: Callable[[Path, Path], None]) -> None:
    """Copies a database, its write-ahead log included; the target is there whole or not at all.

    Args:
        put: gives the finished copy the target's name.

    Raises:
        sqlite3.Error: the source is no sound database of Prefect.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tables-") as folder:
        copy = Path(folder) / target.name
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as read,
            closing(sqlite3.connect(copy)) as written,
        ):
            read.backup(written)
            (found,) = written.execute("PRAGMA quick_check").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(f"{source}: {found}")
            if not written.execute("SELECT version_num FROM alembic_version").fetchone():
                raise sqlite3.DatabaseError(f"{source}: its migrations have not ended")
            # One file, which can be read where nothing can be written.
            written.execute("PRAGMA journal_mode = DELETE")
        put(copy, target)
