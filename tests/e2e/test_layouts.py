"""A run goes on in other layouts of its trainer's ranks, and outlives the loss of one of them."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from slime_core.weights.sync.canary import TOLERANCE_FP32
from tests.e2e.runs import ROOT, RUN_TIMEOUT_S, RunFolder, finish, kill_when_held, start

FLAGS = (
    *("--no-prefect", "--no-use-mlflow", "--device", "cpu", "--save-interval", "100"),
    *("--eval-interval", "100", "--skip-eval-before-train"),
)
TWO = ("--actor-num-gpus-per-node", "2")
TENSOR = (*TWO, "--tensor-model-parallel-size", "2", "--update-weight-transport", "tensor")
HELD = "train-middle@2"


def trainer_pids(command: subprocess.Popen[str]) -> set[int]:
    children = psutil.Process(command.pid).children(recursive=True)
    return {child.pid for child in children if "TrainerActor" in " ".join(child.cmdline())}


def wait_for_held(run: RunFolder, but_not: set[int]) -> int:
    """The pid of a rank that is held and is none of these."""
    marker, deadline = run.workspace / HELD, time.monotonic() + RUN_TIMEOUT_S
    while not marker.exists() or int(marker.read_text()) in but_not:
        assert time.monotonic() < deadline, f"no rank came to {HELD}\n{run.logs()}"
        time.sleep(0.02)
    return int(marker.read_text())


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_in_other_layouts_and_after_the_loss_of_a_rank(tmp_path: Path) -> None:
    """Two data-parallel ranks, then two tensor-parallel ones, then one."""
    run = RunFolder(tmp_path, "layouts")
    first = start(run, *FLAGS, *TWO, "--num-rollout", "4", hold_at=HELD)
    lost = wait_for_held(run, but_not=set())
    ranks = trainer_pids(first)
    assert len(ranks) == 2 and lost in ranks
    psutil.Process(lost).kill()
    wait_for_held(run, but_not=ranks)
    assert not ranks & trainer_pids(first), "the other rank was ended, too"
    kill_when_held(first, run, HELD)

    # Nothing was saved: both iterations are trained again, in another layout.
    output = finish(start(run, *FLAGS, *TENSOR, "--num-rollout", "4"), run)
    assert "iteration 2" in output
    finish(start(run, *FLAGS, "--num-rollout", "5"), run)

    ledgers = list(run.bodies("iterations/*/ledger.json").values())
    assert [ledger["iteration"] for ledger in ledgers] == [0, 1, 2, 3, 4]
    for before, after in pairwise(ledgers):
        assert after["parent"] == before["state"]
    lineages = [ledger["weight_version"].rsplit("-", 1)[0] for ledger in ledgers]
    assert lineages[:2] == ["l0", "l0"], "the first layout"
    assert lineages[2] == lineages[4] != "l0", "other bits have a name of their own"
    assert len({ledger["numeric"] for ledger in ledgers[:4]}) == 1, "a layout is no number"
    for k in range(5):
        canary = run.document(f"iterations/{k:06d}/sync.json")["by"]["canary"]
        assert float(str(canary).removeprefix("f:")) < TOLERANCE_FP32

    verified = subprocess.run(
        [sys.executable, "-m", "flows.cli.main", "verify", "layouts", "--rows",
         "--workspace", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert verified.returncode == 0, verified.stdout + verified.stderr
