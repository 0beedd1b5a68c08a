"""The engines' contract tests against real SGLang on a CPU, in an environment of its own.

`make test-sglang` makes that environment (3 GB) and runs this.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.engines.client import EngineUnreachableError
from slime_core.engines.launcher import EngineProcess, free_port, sglang_command
from slime_core.engines.protocol import GenerateRequest
from slime_core.waits import poll
from tests.contracts.engines.conftest import LINGER, PROMPT, run_scenario

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("SLIME_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
MODEL = ROOT / "configs/quickstart/model"
START_TIMEOUT_S = 300.0
TESTS_TIMEOUT_S = 900.0
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.1,
    "max_total_tokens": 16384,
    "max_running_requests": 32,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "enable_metrics": True,
}
ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONPATH": f"{Path(__file__).parent / 'stubs'}:{LINGER}:{ROOT}",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


@pytest.mark.timeout(START_TIMEOUT_S + TESTS_TIMEOUT_S + 60)
def test_contracts_hold_against_real_sglang(tmp_path):
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} does not exist; make test-sglang makes it")
    port = free_port()
    command = [
        str(PYTHON) if word == sys.executable else word
        for word in sglang_command(str(MODEL), port, OPTIONS)
    ]
    engine = EngineProcess(command, f"http://127.0.0.1:{port}", tmp_path / "sglang.log", ENV)
    engine.start()
    try:
        engine.wait_healthy(START_TIMEOUT_S)
        status = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--tb=short", str(ROOT / "tests/contracts")],
            cwd=ROOT,
            env={**os.environ, "SLIME_TEST_ENGINE_URL": engine.url},
            timeout=TESTS_TIMEOUT_S,
        ).returncode
        if status == 0:
            ends_by_a_flush_right_after_an_answer(engine)
    finally:
        engine.terminate()
    assert status == 0, engine.log_tail()


def ends_by_a_flush_right_after_an_answer(engine: EngineProcess) -> None:
    """The trap that `drain` is for; comes last, since nothing is left of the engine then."""

    async def scenario(client, http):
        await http.post("/slow_down", json={"forward_sleep_time": 1.0})
        await client.generate(GenerateRequest(PROMPT, {"max_new_tokens": 1, "ignore_eos": True}))
        with pytest.raises(EngineUnreachableError):
            await client.update_weights_from_disk(str(MODEL), "v", flush_cache=True)

    run_scenario(engine.url, scenario)
    assert poll("the engine to end", 30, lambda: engine.returncode) != 0
    log = engine.log_path.read_text(errors="replace")
    assert "Cache flush failed after updating weights" in log
