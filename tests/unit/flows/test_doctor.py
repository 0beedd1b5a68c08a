"""slime doctor names what stops a run, and what a person should know."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from flows.cli import doctor
from slime_core.errors import ConfigError


@pytest.fixture
def prefect_server(monkeypatch):
    """A server that answers as Prefect does; yields its settings."""
    settings = {
        "server": {
            "database": {"connection_url": "sqlite+aiosqlite:////home/user/.prefect/prefect.db"},
            "services": {"task_run_recorder": {"batch_size": 1}},
        }
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(settings).encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
    yield settings["server"]
    server.shutdown()
    server.server_close()


def test_this_machine_can_train(tmp_path, capsys):
    assert doctor.main(["--workspace", str(tmp_path / "runs")]) == 0
    text = capsys.readouterr().out
    assert "ready to train" in text
    for name in ("python", "torch", "megatron-core", "ray", "prefect", "workspace", "loopback"):
        assert f"\nok    {name} " in f"\n{text}"
    assert not (tmp_path / "runs").exists()


def test_a_workspace_that_cannot_be_written_stops_a_run(capsys):
    assert doctor.main(["--workspace", "/proc/none"]) == 1
    text = capsys.readouterr().out
    assert "bad   workspace" in text and "fix first: workspace" in text


def test_a_taken_port_is_only_a_note(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(doctor, "PORTS", {taken.getsockname()[1]: "a page"})
        [_, found] = doctor.ports()
    assert found.mark == "note" and "in use" in found.text


def test_a_stock_prefect_server_on_sqlite_gets_the_settings_that_cure_it(prefect_server):
    [found, _] = doctor.services()
    assert found.mark == "note"
    assert "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE=2000" in found.text
    prefect_server["services"]["task_run_recorder"]["batch_size"] = 2000
    assert next(doctor.services()).mark == "ok"
    prefect_server["services"]["task_run_recorder"]["batch_size"] = 1
    prefect_server["database"]["connection_url"] = "postgresql+asyncpg://db/prefect"
    assert next(doctor.services()).mark == "ok"


def test_servers_that_do_not_answer_are_named(monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    prefect, mlflow = doctor.services()
    assert (prefect.mark, mlflow.mark) == ("bad", "note")
    assert "127.0.0.1:9" in prefect.text and "127.0.0.1:9" in mlflow.text


def test_an_unknown_flag_is_refused():
    with pytest.raises(ConfigError, match="did you mean --workspace"):
        doctor.main(["--workspce", "x"])
