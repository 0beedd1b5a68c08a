"""The Prefect server process: `python -m flows.server_app`, started by flows.server.OwnServer for
one command, or by flows.services to stay."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from flows.server import die_with_parent
from flows.server_template import keep_template, lay_template

PARENT_CHECK_S = 1.0
GRACE_S = 4
WAL_PRAGMAS = ("wal_autocheckpoint = 256", f"journal_size_limit = {2**20}")
"""The write-ahead log is brought into the database after each megabyte, and cut back to that once
it is empty. It would stay at twice the database of a short run otherwise."""


def create_app() -> Any:
    """Prefect's API and pages, with write transactions that take the lock when they begin, a
    write-ahead log that stays small, and tables that a new workspace gets as a copy.

    A deferred SQLite transaction that reads first cannot become a writer while another one
    writes: it fails at once, whatever the busy timeout, and the client sleeps two seconds before
    it tries again. Taking the lock at the beginning queues the writers instead.
    """
    from prefect.server.api.server import create_app as prefect_app
    from prefect.server.database.configurations import AioSqliteConfiguration
    from prefect.server.database.interface import PrefectDBInterface

    begin_deferred = AioSqliteConfiguration.begin_transaction

    @asynccontextmanager
    async def begin_immediate(
        self: AioSqliteConfiguration, session: Any, with_for_update: bool = False
    ) -> AsyncIterator[Any]:
        async with begin_deferred(self, session, with_for_update=True) as transaction:
            yield transaction

    setup = AioSqliteConfiguration.setup_sqlite

    def setup_small(self: AioSqliteConfiguration, conn: Any, record: Any) -> None:
        setup(self, conn, record)
        cursor = conn.cursor()
        for pragma in WAL_PRAGMAS:
            cursor.execute(f"pragma {pragma}")
        cursor.close()

    migrate = PrefectDBInterface.run_migrations_upgrade
    database = Path(os.environ["PREFECT_HOME"]) / "prefect.db"

    async def migrate_once(self: PrefectDBInterface) -> None:
        had_tables = await asyncio.to_thread(lay_template, database)
        await migrate(self)
        if not had_tables:
            await asyncio.to_thread(keep_template, database)

    AioSqliteConfiguration.begin_transaction = begin_immediate
    AioSqliteConfiguration.setup_sqlite = setup_small
    PrefectDBInterface.run_migrations_upgrade = migrate_once
    return prefect_app(final=True)


def watch_parent(parent_pid: int) -> None:
    """Ends this process a little after its parent, where no signal did."""
    while os.getppid() == parent_pid:
        time.sleep(PARENT_CHECK_S)
    time.sleep(GRACE_S + PARENT_CHECK_S)
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--fd", type=int, required=True, help="bound socket to listen on")
    parser.add_argument("--parent", type=int, help="process to die with; none for a service")
    options = parser.parse_args()
    if options.parent is not None:
        die_with_parent(options.parent)
        threading.Thread(target=watch_parent, args=(options.parent,), daemon=True).start()

    import uvicorn

    config = uvicorn.Config(
        create_app,
        factory=True,
        log_level="warning",
        lifespan="on",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=GRACE_S,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=options.fd)])


if __name__ == "__main__":
    main()
