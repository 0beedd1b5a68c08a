"""Checkpoints written beside training: a kill while one is in the making loses nothing, and what
the run goes on to is what an audit in another layout finds."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.e2e.runs import ROOT, RunFolder, finish, kill_when_held, start

HELD = "save-written@2"


def audited(run: RunFolder, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli.main", "audit", *arguments,
         "--workspace", str(run.workspace)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def content(run: RunFolder) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.store.rglob("*") if path.is_file()}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kill_while_a_checkpoint_is_written_loses_nothing(
    tmp_path: Path,
) -> None:
    run = RunFolder(tmp_path, "saves")
    weights = tmp_path / "weights" / "{rollout_id}"
    flags = (
        *("--no-prefect", "--no-use-mlflow", "--device", "cpu", "--num-rollout", "5"),
        *("--eval-interval", "100", "--skip-eval-before-train"),
        *("--async-save", "--save-interval", "1", "--save-hf", str(weights)),
    )
    kill_when_held(start(run, *flags, hold_at=HELD), run, HELD)
    final = {key.split("/")[1] for key in run.bodies("checkpoints/*/manifest.json")}
    assert final == {"000000-000000", "000001-000000"}, "the one in the making does not count"

    output = finish(start(run, *flags), run)
    assert "the checkpoint after iteration 1, and" in output
    ledgers = list(run.bodies("iterations/*/ledger.json").values())
    assert [ledger["iteration"] for ledger in ledgers] == [0, 1, 2, 3, 4]
    for before, after in pairwise(ledgers):
        assert after["parent"] == before["state"]
    lineages = {ledger["weight_version"].rsplit("-", 1)[0] for ledger in ledgers}
    assert lineages == {"l0"}, "what was trained again gave the same weights"
    manifests = list(run.bodies("checkpoints/*/manifest.json").values())
    assert [manifest["iteration"] for manifest in manifests] == [3, 4]
    assert manifests[-1]["state"] == ledgers[-1]["state"]
    for k in range(5):
        file = tmp_path / "weights" / str(k) / "model.safetensors"
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["weight_version"] == f"l0-{k + 1}"

    # Any of its iterations is what it is said to be, in other layouts and precisions, too.
    before = content(run)
    same = audited(run, "saves@4", "--layout", "tp2-sp")
    assert same.returncode == 0, same.stdout + same.stderr
    assert "as tp2-sp in float32: every metric is as it was stored" in same.stdout
    rounded = audited(run, "saves@4", "--dtype", "bfloat16", "--tolerance", "1e-5", "--json")
    assert rounded.returncode == 1, rounded.stderr
    rows = [json.loads(line) for line in rounded.stdout.splitlines()]
    departing = {row["metric"] for row in rows if row["departs"]}
    assert {"rollout/entropy", "grad_norm"} <= departing and "tokens" not in departing
    refused = audited(run, "saves@4", "--layout", "tp3")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert content(run) == before
