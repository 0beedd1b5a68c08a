"""slime's own command line trains, and each of its flags shows in what the run leaves behind."""

import os
import subprocess
import sys

import pytest

from tests.e2e.runs import QUICKSTART, ROOT, RUN_TIMEOUT_S, RunFolder

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LINE = """
    --swiglu --num-layers 2 --hidden-size 96 --disable-bias-linear --normalization RMSNorm
    --group-query-attention --weight-decay 0.25 --lr-decay-style constant --adam-beta2 0.98
    --sglang-log-level info --sglang-mem-fraction-static 0.5 --sglang-tp-size 1
    --num-rollout 2 --rollout-num-gpus 2 --skip-eval-before-train --no-use-mlflow
    --log-level DEBUG --no-prefect
"""


def test_a_line_in_slimes_form_trains(tmp_path):
    run = RunFolder(tmp_path / "runs", "line")
    saved = tmp_path / "saved"
    places = ["--workspace", str(run.workspace), "--run-id", run.run_id]
    folders = ["--load", str(saved), "--save", f"{saved}/"]
    done = subprocess.run(
        [sys.executable, "train.py", str(QUICKSTART), *places, *folders, *LINE.split()],
        cwd=ROOT, env=dict(os.environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=RUN_TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{run.logs()}"
    assert "needs SGLang, so the embedded engine ignores it: --sglang-mem" in done.stdout
    ledgers = sorted((saved / run.run_id / "iterations").glob("*/ledger.json"))
    assert len(ledgers) == 2, "--save is where the store is"
    assert not (run.workspace / "store").exists()
    logs = run.workspace / "local" / run.run_id / "logs"
    assert {path.name for path in logs.glob("engine-*.log")} == {"engine-0.log", "engine-1.log"}
    assert " DEBUG " in (logs / "driver.log").read_text()
    assert not (run.workspace / "mlflow").exists()
