import sqlite3
from contextlib import closing

from flows.cli.settle import shown_as_running


def test_a_run_that_prefect_shows_as_running_is_found_without_a_server(tmp_path):
    assert not shown_as_running(tmp_path, "a"), "there is no database"
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as made:
        assert not shown_as_running(tmp_path, "a"), "nor a table in it"
        made.execute("CREATE TABLE flow_run (state_type, tags)")
        rows = [("RUNNING", '["x", "run:a"]'), ("COMPLETED", '["run:b"]'), ("RUNNING", "[]")]
        made.executemany("INSERT INTO flow_run VALUES (?, ?)", rows)
        made.commit()
    assert shown_as_running(tmp_path, "a")
    assert not shown_as_running(tmp_path, "b") and not shown_as_running(tmp_path, "aa")
