"""`slime logs`."""

import pytest

from flows.cli.main import main
from tests.unit.store.runs import stored_run

LINE = "2026-11-30 00:00:{:02d},000 INFO slime_core: {}\n"


@pytest.fixture
def workspace(tmp_path):
    stored_run(tmp_path / "store", "sorting", 1)
    logs = tmp_path / "local" / "sorting" / "logs"
    logs.mkdir(parents=True)
    (logs / "driver.log").write_text(LINE.format(1, "begins") + LINE.format(3, "ends"))
    (logs / "trainer-0.log").write_text(LINE.format(2, "is built"))
    return tmp_path


def printed(capsys) -> list[str]:
    return [line.split(" ", 2)[2] for line in capsys.readouterr().out.splitlines()]


def test_lines_of_all_processes_come_in_the_order_of_time(workspace, capsys):
    asked = ["logs", "sort", "--workspace", str(workspace)]
    assert main(asked) == 0
    assert printed(capsys) == ["driver     begins", "trainer-0  is built", "driver     ends"]
    assert main([*asked, "--lines", "1"]) == 0
    assert printed(capsys) == ["driver     ends"]
    assert main([*asked, "--source", "trainer"]) == 0
    assert printed(capsys) == ["trainer-0  is built"]


def test_following_a_run_that_has_ended_ends(workspace, capsys):
    assert main(["logs", "sort", "--workspace", str(workspace), "--follow"]) == 0
    assert len(printed(capsys)) == 3


def test_logs_of_another_machine_are_named(tmp_path, capsys):
    stored_run(tmp_path / "store", "sorting", 1)
    assert main(["logs", "sort", "--workspace", str(tmp_path)]) == 2
    assert "logs lie on the machine" in capsys.readouterr().err
