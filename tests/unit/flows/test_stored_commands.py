"""`slime runs` and `slime verify` on stored runs."""

import json

import pytest

from flows.cli.main import main
from tests.unit.store.runs import stored_run


@pytest.fixture
def workspace(tmp_path):
    stored_run(tmp_path / "store", "sorting", 2)
    return tmp_path


def test_runs_are_listed(workspace, capsys):
    assert main(["runs", "--workspace", str(workspace)]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "iterations", "reward", "age", "where"]
    assert line.split()[:4] == ["sorting", "new", "2", "1"]
    assert main(["runs", "--json", "--store-url", str(workspace / "store")]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == "sorting"


def test_an_empty_and_a_missing_store(tmp_path, capsys):
    assert main(["runs", "--workspace", str(tmp_path / "none")]) == 2
    assert "none/store is not there: give the --workspace" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    (tmp_path / "store").mkdir()
    assert main(["runs", "--workspace", str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().out


def test_verify_says_sound_or_what_is_wrong(workspace, capsys):
    asked = ["verify", "sort", "--workspace", str(workspace)]
    assert main([*asked, "--rows"]) == 0
    assert capsys.readouterr().out.endswith("sound\n")
    part = next((workspace / "store" / "sorting" / "groups" / "000001").glob("*.arrow"))
    part.write_bytes(part.read_bytes()[:-1])
    assert main(asked) == 1
    output = capsys.readouterr().out
    assert f"bad: groups/000001/{part.name} is damaged" in output
    assert main([*asked, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["objects"] > 10 and any(part.name in text for text in found["problems"])
