"""What a command says at its end."""

import json
import socket
from dataclasses import asdict

from flows.cli.summary import HOST, page_port, summary
from flows.services import processes
from slime_core.run.process import own_identity
from tests.unit.config.trees import small


def test_a_page_gets_another_port_where_something_listens_on_its_own():
    with socket.create_server((HOST, 0)) as taken:
        usual = taken.getsockname()[1]
        assert page_port(usual) != usual
    assert page_port(usual) == usual


def test_the_end_says_how_where_and_what_is_missing(tmp_path):
    config = small(workspace=str(tmp_path), use_mlflow=False)
    lines = summary(config, "r", "is finished", tmp_path / "prefect", ["mlflow lacks 2 records"])
    assert lines[0] == "run r is finished"
    assert f"  store    {tmp_path / 'store' / 'r'}" in lines
    assert f"  logs     {tmp_path / 'local' / 'r' / 'logs'}" in lines
    assert lines[-2].startswith("  Prefect  PREFECT_HOME=") and " --port " in lines[-2]
    assert " PREFECT_SERVER_ANALYTICS_ENABLED=false " in lines[-2], "the command sends telemetry"
    assert lines[-1] == "  note: mlflow lacks 2 records"
    assert not any("Prefect" in line for line in summary(config, "r", "finished", None, []))


def test_pages_that_are_open_are_named_instead_of_commands(tmp_path):
    folder = processes.folder_of(tmp_path)
    folder.mkdir()
    for name in ("server", "mlflow"):
        service = processes.Service(name, own_identity(), f"http://here/{name}", 7)
        (folder / f"{name}.json").write_text(json.dumps(asdict(service)))
    config = small(workspace=str(tmp_path), use_mlflow=True)
    lines = summary(config, "r", "finished", tmp_path / "prefect", [])
    assert "  MLflow   http://here/mlflow" in lines
    assert "  Prefect  http://here/server" in lines
    assert not any("/server" in line for line in summary(config, "r", "finished", None, []))
    elsewhere = small(workspace=str(tmp_path), use_mlflow=True, mlflow_tracking_uri="http://far")
    assert "  MLflow   http://far" in summary(elsewhere, "r", "finished", None, [])
