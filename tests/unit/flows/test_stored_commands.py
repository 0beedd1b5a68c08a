"""`slime runs` and `slime verify` on stored runs."""

import json
import os
import re
import tempfile
import time
from dataclasses import asdict

import pytest

from flows.cli.main import main
from slime_core.run.epoch import Lease
from slime_core.run.pause import Pause
from slime_core.run.process import own_identity
from slime_core.store.backend import open_backend
from tests.s3 import ENVIRONMENT
from tests.unit.store.runs import stored_run


@pytest.fixture
def workspace(tmp_path):
    stored_run(tmp_path / "store", "sorting", 2)
    return tmp_path


def test_runs_are_listed(workspace, capsys):
    assert main(["runs", "--workspace", str(workspace)]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert re.split(" {2,}", head) == ["run", "state", "done", "reward", "last change"]
    assert re.split(" {2,}", line)[:4] == ["sorting", "new", "2 of ?", "1.000"]
    assert main(["runs", "--json", "--store-url", str(workspace / "store")]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == "sorting"


def test_a_paused_run_is_shown_with_its_cause(workspace, capsys, monkeypatch):
    local = workspace / "local" / "sorting"
    local.mkdir(parents=True)
    now_s = time.time()
    pause = Pause("sorting", own_identity(), "pack 000002", "no space left", now_s, now_s + 60)
    (local / "paused.json").write_text(json.dumps(asdict(pause)))
    assert main(["runs", "--workspace", str(workspace)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert re.split(" {2,}", line)[:2] == ["sorting", "paused"] and "no space left" in line
    assert main(["status", "--workspace", str(workspace)]) == 3
    shown = capsys.readouterr().out
    assert re.search(rf"sorting +paused +{os.getpid()} ", shown)
    assert "sorting is paused at pack 000002: no space left. It goes on by itself" in shown
    away = ["--store-url", "s3://nowhere/x"]
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    for command in ("status", "runs"):
        monkeypatch.setattr(f"flows.cli.{command}.AWAY_PATIENCE_S", 0.5)
    assert main(["status", "--workspace", str(workspace), "--json", *away]) == 3
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [(row["state"], row["why"]) for row in rows if "run" in row] == [
        ("paused", "no space left")
    ]
    assert main(["runs", "--workspace", str(workspace), "--json", *away]) == 3
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {
        "run_id": "sorting",
        "state": "paused",
        "note": "no space left",
    }
    assert "does not say which runs it holds: s3://nowhere/x" in shown.err
    assert main(["runs", "--workspace", str(workspace), *away]) == 3
    assert "sorting is paused at pack 000002: no space left." in capsys.readouterr().out


def test_an_empty_and_a_missing_store(tmp_path, capsys):
    assert main(["runs", "--workspace", str(tmp_path / "none")]) == 2
    assert "none/store is not there, or you may not read it: give" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    (tmp_path / "store").mkdir()
    assert main(["runs", "--workspace", str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().out


@pytest.mark.parametrize(
    "asked", [["runs"], ["verify", "last", "--rows"], ["query", "last", "SELECT 1 AS one"]]
)
def test_reading_creates_nothing_and_so_needs_no_right_to_write(
    workspace, asked, monkeypatch, capsys
):
    (workspace / "store" / "sorting" / ".tmp").rmdir()
    (workspace / "store" / ".tmp").rmdir()
    before = sorted(workspace.rglob("*"))
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert main([*asked, "--workspace", str(workspace)]) == 0
    assert sorted(workspace.rglob("*")) == before


def test_stop_says_how_a_run_has_ended(workspace, capsys):
    asked = ["stop", "sorting", "--workspace", str(workspace)]
    lease = Lease.acquire(open_backend(str(workspace / "store" / "sorting")))
    lease.release()
    assert main(asked) == 0
    assert capsys.readouterr().out == "run sorting does not run: it has stopped already\n"


@pytest.mark.parametrize("command", ["up", "status", "down"])
def test_a_workspace_that_cannot_be_used_is_one_sentence(command, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([command, "--workspace", str(tmp_path / "file")]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("slime: workspace ") and "--workspace" in complaint
    assert complaint.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's rights are taken on")
@pytest.mark.parametrize("command", ["up", "status", "down"])
def test_a_workspace_of_another_user_is_one_sentence(command, capsys):
    with tempfile.TemporaryDirectory() as theirs:
        os.seteuid(65534)
        try:
            status = main([command, "--workspace", f"{theirs}/runs"])
        finally:
            os.seteuid(0)
    complaint = capsys.readouterr().err
    assert status == 2 and complaint.startswith("slime: workspace ")
    assert "Permission denied" in complaint and complaint.count("\n") == 1


def test_a_refused_fork_makes_no_folder(workspace, capsys):
    before = sorted((workspace / "store").iterdir())
    asked = ["fork", "sorting", "--workspace", str(workspace), "--run-id", "twig"]
    assert main([*asked, "--at", "7"]) == 2
    assert "it cannot be forked at 7" in capsys.readouterr().err
    assert sorted((workspace / "store").iterdir()) == before


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


def test_query_prints_or_writes_the_answer(workspace, capsys):
    asked = ["query", "sorting", "--workspace", str(workspace)]
    assert main([*asked, "SELECT count(*) AS n, avg(reward) AS r FROM samples"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert (head.split(), line.split()) == (["n", "r"], ["16", "0.5"])
    assert main([*asked, "SELECT range FROM range(300)"]) == 0
    assert "300 rows in all" in capsys.readouterr().out
    assert main([*asked, "SELECT 1 AS one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"one": 1}
    target = workspace / "rows.jsonl"
    assert main([*asked, "SELECT 1 AS one", "--to", str(target)]) == 0
    assert capsys.readouterr().out == f"1 rows in {target}\n"
    assert json.loads(target.read_text()) == {"one": 1}
    assert main([*asked, "SELECT run_id, iterations FROM Runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run_id": "sorting", "iterations": 2}
    assert main([*asked, "SELECT one FROM samples"]) == 2
    assert "cannot be answered" in capsys.readouterr().err


def test_export_writes_every_row(workspace, capsys):
    asked = ["export", "--workspace", str(workspace), "sorting"]
    assert main([*asked, str(workspace / "rows.parquet"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 16 and found["bytes"] == (workspace / "rows.parquet").stat().st_size
    assert main([*asked, "rows.csv"]) == 2
    assert "has to end with .parquet" in capsys.readouterr().err


def test_gc_compacts_and_a_dry_run_changes_nothing(workspace, capsys):
    asked = ["gc", "sorting", "--workspace", str(workspace), "--json"]
    files = sorted(path for path in workspace.rglob("*") if path.is_file())
    assert main([*asked, "--keep-last", "1", "--dry-run"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["segments_dropped"], found["objects_deleted"]) == (0, 0)
    assert sorted(path for path in workspace.rglob("*") if path.is_file()) == files
    assert main([*asked, "--compact"]) == 0
    assert json.loads(capsys.readouterr().out)["segments_compacted"] == 2
    assert len(list((workspace / "store" / "sorting" / "groups").rglob("*.arrow"))) == 2
    assert main(["verify", "sorting", "--workspace", str(workspace), "--rows"]) == 0
    assert main([*asked, "--keep-last", "0"]) == 2
    capsys.readouterr()


def test_rescore_with_a_grader_of_ones_own(workspace, capsys):
    grader = workspace / "grader.py"
    grader.write_text(
        "async def reward_func(args, sample, **kwargs):\n    return len(sample.response)\n"
    )
    asked = ["rescore", "sorting", "--workspace", str(workspace), "--json"]
    assert main([*asked, "--segments", "1", "--custom-rm-path", str(grader)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["segment"], found["rows"], found["failed"]) == (1, 8, 0)
    assert found["reward_now"] == 8.0, "`answer i` has 8 letters"
    assert main(asked) == 2
    assert "give --custom-rm-path or --rm-type" in capsys.readouterr().err
