"""`slime open` where nobody said that a page is served: it asks who is at the usual port."""

import json
import sqlite3
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flows.pages import places

RUN = "sorting"


class Pages(BaseHTTPRequestHandler):
    """Prefect's and MLflow's answers for one run, or those of something else."""

    foreign = False

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = body["flow_runs"]["tags"]["all_"] == [f"run:{RUN}"]
        self._answer(200, {"no": "list"} if self.foreign else [{"id": "abc"}] if known else [])

    def do_GET(self):
        known = self.path == "/api/2.0/mlflow/runs/get?run_id=beef"
        self._answer(200 if known and not self.foreign else 404, {})

    def _answer(self, status, content):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_):
        """Silent."""


@pytest.fixture
def port(monkeypatch, tmp_path):
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "users"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(places, "PREFECT_PORT", server.server_port)
        monkeypatch.setattr(places, "MLFLOW_PORT", server.server_port)
        yield server.server_port
        server.shutdown()


@pytest.fixture
def workspace(tmp_path):
    home = tmp_path / "w" / "prefect"
    home.mkdir(parents=True)
    with closing(sqlite3.connect(home / "prefect.db")) as made:
        made.execute("CREATE TABLE flow_run (id, parent_task_run_id, tags, created)")
        made.execute("INSERT INTO flow_run VALUES ('abc', NULL, ?, 1)", [f'["run:{RUN}"]'])
        made.commit()
    return tmp_path / "w"


def test_a_server_that_a_printed_command_started_is_found(port, workspace):
    page = places.prefect_page(workspace, RUN)
    assert page == f"http://127.0.0.1:{port}/runs/flow-run/abc"
    assert places._mlflow_knows(f"http://127.0.0.1:{port}", "#/experiments/1/runs/beef")


def test_a_server_that_does_not_know_the_run_is_not_the_one(port, workspace, monkeypatch):
    assert places.prefect_page(workspace, "other").startswith("PREFECT_HOME=")
    assert not places._mlflow_knows(f"http://127.0.0.1:{port}", "#/experiments/1/runs/dead")
    monkeypatch.setattr(Pages, "foreign", True)
    page = places.prefect_page(workspace, RUN)
    assert page.startswith("PREFECT_HOME=") and page.endswith("then /runs/flow-run/abc")


def test_where_nobody_is_the_command_is_told(port, workspace, monkeypatch):
    monkeypatch.setattr(places, "PREFECT_PORT", 9)
    assert places.prefect_page(workspace, RUN).endswith("then /runs/flow-run/abc")
    assert not places._mlflow_knows("http://127.0.0.1:9", "#/experiments/1/runs/beef")
