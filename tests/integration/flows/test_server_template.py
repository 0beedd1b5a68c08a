"""Prefect's own server on a copied database: the same tables as its migrations make."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from flows.server import OwnServer
from flows.server_template import template_path


def schema_of(database: Path) -> set[tuple[str, str, str]]:
    with closing(sqlite3.connect(database)) as read:
        return set(read.execute("SELECT type, name, sql FROM sqlite_master"))


def rows_of(database: Path, table: str) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(database)) as read:
        return read.execute(f"SELECT * FROM {table}").fetchall()


@pytest.mark.slow
def test_a_second_workspace_has_the_tables_and_none_of_the_rows_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    for name in ("first", "second"):
        server = OwnServer.start(tmp_path / name)
        server.wait_healthy(240)
        server.stop()
        assert (tmp_path / name / "prefect" / "server.log").read_text() == ""
    first, second = (tmp_path / name / "prefect" / "prefect.db" for name in ("first", "second"))
    assert schema_of(first) == schema_of(second) == schema_of(template_path())
    written = {
        name
        for kind, name, _ in schema_of(template_path())
        if kind == "table" and not name.startswith("sqlite_") and rows_of(template_path(), name)
    }
    assert written == {"alembic_version"}
    assert rows_of(first, "alembic_version") == rows_of(second, "alembic_version")
    # What a server writes by itself is made again, with ids of its own.
    assert len(rows_of(first, "block_type")) == len(rows_of(second, "block_type")) > 0
    assert not set(rows_of(first, "block_type")) & set(rows_of(second, "block_type"))
