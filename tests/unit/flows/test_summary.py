"""What a command says at its end."""

import socket

from flows.cli.summary import HOST, page_port, summary
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
    assert lines[-1] == "  note: mlflow lacks 2 records"
    assert not any("Prefect" in line for line in summary(config, "r", "finished", None, []))
