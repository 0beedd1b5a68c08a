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
LOUD = """
def reward(args, sample, **kwargs):
    print("a reward")
    return float(sample.response.startswith(sample.label))


def before_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    print("a step of", rollout_id)
"""


def test_a_line_in_slimes_form_trains(tmp_path):
    run = RunFolder(tmp_path / "runs", "line")
    saved = tmp_path / "saved"
    places = ["--workspace", str(run.workspace), "--run-id", run.run_id]
    loud = tmp_path / "loud.py"
    loud.write_text(LOUD)
    functions = ["--custom-rm-path", f"{loud}:reward"]
    functions += ["--custom-megatron-before-train-step-hook-path", f"{loud}:before_step"]
    folders = ["--load", str(saved), "--save", f"{saved}/"]
    done = subprocess.run(
        [
            *(sys.executable, "train.py", str(QUICKSTART)),
            *(*places, *folders, *functions, *LINE.split()),
        ],
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
    assert (logs / "trainer-0.out").read_text().splitlines() == ["a step of 0", "a step of 1"]
    assert "a reward\n" in (logs / "rollout-0.out").read_text()
    assert " DEBUG " in (logs / "driver.log").read_text()
    assert not (run.workspace / "mlflow").exists()
