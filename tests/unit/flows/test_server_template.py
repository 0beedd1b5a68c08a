"""The template of Prefect's tables: who gets one, what happens to a broken one."""

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from flows.server_template import keep_template, lay_template, template_path


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def migrated(path: Path, *, wal: bool = True) -> Path:
    """What the migrations leave, still in the write-ahead log."""
    with closing(sqlite3.connect(path)) as made:
        if wal:
            made.execute("PRAGMA journal_mode = WAL")
        made.execute("CREATE TABLE alembic_version (version_num TEXT)")
        made.execute("INSERT INTO alembic_version VALUES ('abc')")
        made.execute("CREATE TABLE flow_run (id TEXT)")
        made.commit()
    return path


def tables_of(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as read:
        return {name for (name,) in read.execute("SELECT name FROM sqlite_master")}


def test_the_second_workspace_gets_the_tables_of_the_first(tmp_path):
    assert not lay_template(tmp_path / "second.db")
    keep_template(migrated(tmp_path / "first.db"))
    assert lay_template(tmp_path / "second.db")
    assert tables_of(tmp_path / "second.db") == {"alembic_version", "flow_run"}
    assert [entry.name for entry in template_path().parent.iterdir()] == [template_path().name]
    assert stat.S_IMODE(template_path().parent.stat().st_mode) == 0o700


def test_what_the_write_ahead_log_still_holds_is_copied(tmp_path):
    migrated(tmp_path / "first.db")
    with closing(sqlite3.connect(tmp_path / "first.db")) as open_elsewhere:
        open_elsewhere.execute("CREATE TABLE late (id TEXT)")
        open_elsewhere.commit()
        assert (tmp_path / "first.db-wal").stat().st_size > 0
        keep_template(tmp_path / "first.db")
    assert "late" in tables_of(template_path())


def test_a_database_that_is_there_is_left_alone(tmp_path):
    keep_template(migrated(tmp_path / "first.db"))
    (tmp_path / "own.db").write_bytes(b"mine")
    assert lay_template(tmp_path / "own.db")
    assert (tmp_path / "own.db").read_bytes() == b"mine"


def test_a_database_that_another_command_makes_meanwhile_is_left_alone(tmp_path, monkeypatch):
    keep_template(migrated(tmp_path / "first.db"))
    own, connect = tmp_path / "own.db", sqlite3.connect

    def late(*args, **options):
        own.write_bytes(b"in use")
        return connect(*args, **options)

    monkeypatch.setattr(sqlite3, "connect", late)
    assert lay_template(own)
    assert own.read_bytes() == b"in use"
    assert {entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")} == set()


@pytest.mark.parametrize("content", [b"", b"not a database at all", "cut", "foreign"])
def test_a_broken_template_is_not_used_and_replaced_by_the_next(tmp_path, content, caplog):
    sound = migrated(tmp_path / "first.db", wal=False)
    template_path().parent.mkdir(parents=True)
    if content == "cut":
        content = sound.read_bytes()[:5000]
    if content == "foreign":
        with closing(sqlite3.connect(tmp_path / "foreign.db")) as made:
            made.execute("CREATE TABLE photos (id TEXT)")
        content = (tmp_path / "foreign.db").read_bytes()
    template_path().write_bytes(content)
    assert not lay_template(tmp_path / "second.db")
    assert not (tmp_path / "second.db").exists()
    assert "their template failed" in caplog.text
    keep_template(sound)
    assert lay_template(tmp_path / "second.db")


def test_without_a_place_for_it_the_server_makes_its_tables_itself(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_template(migrated(tmp_path / "first.db"))
    assert "no template" in caplog.text
    assert not lay_template(tmp_path / "second.db")
