"""A trained run is trained again to the bit, and a fork of it goes its own way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, RunFolder, finish, kill_when_held, start

FLAGS = (
    *("--no-prefect", "--no-use-mlflow", "--save-interval", "2", "--num-rollout", "4"),
    *("--eval-interval", "100", "--skip-eval-before-train"),
)


def slime(run: RunFolder, name: str, *flags: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli.main", name, *flags, "--workspace", str(run.workspace)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replay_and_fork(tmp_path: Path) -> None:
    base, twig = RunFolder(tmp_path, "base"), RunFolder(tmp_path, "twig")
    finish(start(base, *FLAGS), base)

    code, output = slime(base, "replay", "base", "--iterations", "1:4", "--json")
    assert code == 0, output
    assert [json.loads(line)["same"] for line in output.splitlines()] == [True] * 3
    code, output = slime(base, "replay", "base", "--iterations", "3", "--lr", "0.01", "--json")
    assert code == 0 and not json.loads(output)["same"], output

    code, output = slime(base, "compare", "base@2", "--with", "grpo,rloo", "--json")
    assert code == 0, output
    then, grpo, rloo = (json.loads(line) for line in output.splitlines())
    assert {**then, "algorithm": "grpo"} == grpo and grpo["cosine"] > 1 - 1e-9
    assert 0.9 < rloo["cosine"] < 1 - 1e-6 and rloo["grad_norm"] < grpo["grad_norm"]
    ledger = base.document("iterations/000002/ledger.json")["body"]["result"]["steps"][0]
    assert abs(float(ledger["grad_norm"].removeprefix("f:")) - grpo["grad_norm"]) < 1e-6

    code, output = slime(base, "fork", "base", "--at", "1", "--run-id", "twig")
    assert code == 0, output
    finish(start(twig, *FLAGS, "--lr", "0.01"), twig)
    for run in (base, twig):
        code, output = slime(run, "verify", run.run_id, "--rows")
        assert code == 0, output
    common, different = "iterations/000001/ledger.json", "iterations/000002/ledger.json"
    assert base.document(common) == twig.document(common)
    assert base.document(different)["body"]["state"] != twig.document(different)["body"]["state"]
    code, output = slime(twig, "replay", "twig", "--iterations", "2:4")
    assert code == 0 and "the same weights to the bit" in output, output


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_resume_replays_each_iteration_with_the_learning_rate_of_its_time(tmp_path: Path) -> None:
    """Two iterations at one rate and one at another, never saved: both kinds are replayed."""
    run = RunFolder(tmp_path, "rates")
    flags = (*FLAGS, "--save-interval", "100")
    slower = (*flags, "--lr", "0.0002")
    kill_when_held(start(run, *flags, hold_at="sync@1"), run, "sync@1")
    kill_when_held(start(run, *slower, hold_at="sync@2"), run, "sync@2")
    output = finish(start(run, *slower), run)
    assert "replay gave other weights" not in output

    ledgers = [run.document(f"iterations/{k:06d}/ledger.json")["body"] for k in range(4)]
    assert [body["weight_version"] for body in ledgers] == ["l0-1", "l0-2", "l0-3", "l0-4"]
    assert ledgers[0]["numeric"] == ledgers[1]["numeric"] != ledgers[2]["numeric"]
    code, output = slime(run, "replay", "rates", "--iterations", "0:4")
    assert code == 0 and "the same weights to the bit" in output, output
