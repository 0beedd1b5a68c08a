"""Runs the engines' contract tests against real SGLang on the quickstart's model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.host import keep, parser
from benchmarks.gpu.quickstart import SGLANG
from slime_core.engines.launcher import engine_process, free_port

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "configs/quickstart/model"
TESTS = ROOT / "tests/contracts/engines"
LINGER = ROOT / "tests/contracts/linger"
"""Makes the moment after an answer long enough for the tests that need to hit it."""
START_TIMEOUT_S = 400.0


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    made.add_argument("--timeout-s", type=float, default=300.0, help="for all tests together")
    options = made.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    # Deterministic: seeds count, batches do not change tokens, and fp32 has its norm kernel.
    wanted = {**SGLANG, "dtype": options.dtype, "enable_metrics": True,
              "enable_deterministic_inference": True}  # fmt: skip
    log = options.out / "contracts-sglang.log"
    folders = [str(LINGER), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(folders)}
    engine = engine_process("sglang", str(MODEL), free_port(), log, wanted, env=env)
    engine.start()
    try:
        engine.wait_healthy(START_TIMEOUT_S)
        report = options.out / "contracts-pytest.log"
        summary, status = _run_tests(engine.url, report, options.timeout_s)
    finally:
        engine.terminate()
    keep(options.out, "contracts", {"summary": summary, "status": status})
    print(summary)
    return status


def _run_tests(url: str, report: Path, timeout_s: float) -> tuple[str, int]:
    """pytest's last line and exit status; the whole output goes into `report`."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", str(TESTS)]
    env = {**os.environ, "SLIME_TEST_ENGINE_URL": url}
    with report.open("w") as out:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=timeout_s
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            out.write(f"\nended after {timeout_s:.0f} s\n")
            status = 124
    lines = [line for line in report.read_text().splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "\n".join([*failed, lines[-1]]), status


if __name__ == "__main__":
    raise SystemExit(main())
