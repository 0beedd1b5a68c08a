"""Tells Prefect the end of a run that was killed after its last iteration, before Prefect knew."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

log = logging.getLogger(__name__)
OPEN_STATES = "('SCHEDULED', 'PENDING', 'RUNNING', 'CANCELLING')"


def shown_as_running(home: Path, run_id: str) -> bool:
    """Whether the database of the workspace's own server has an unfinished flow run of a training.
    Read without a server, since starting one takes seconds and hardly ever is there anything.

    Args:
        home: the server's folder.
    """
    database = home / "prefect.db"
    if not database.is_file():
        return False
    tag = f'%"run:{run_id}"%'
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as read:
            found = read.execute(
                f"SELECT 1 FROM flow_run WHERE state_type IN {OPEN_STATES} AND tags LIKE ? LIMIT 1",
                (tag,),
            ).fetchone()
    except sqlite3.Error as error:
        log.info("Prefect's database %s cannot be read: %s", database, error)
        return False
    return found is not None
