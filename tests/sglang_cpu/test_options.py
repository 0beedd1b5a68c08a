"""The shipped list of SGLang's options is what the pinned SGLang gives."""

from __future__ import annotations

import os
import subprocess

import pytest

from slime_core.engines.sglang_options import LIST
from tests.sglang_cpu.test_contracts import ENV, PYTHON, ROOT

pytestmark = pytest.mark.sglang


def test_the_list_is_made_from_the_installed_sglang():
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} does not exist; make test-sglang makes it")
    made = subprocess.run(
        [str(PYTHON), "-m", "slime_core.engines.sglang_options"],
        capture_output=True, text=True, timeout=300, check=True, cwd=ROOT,
        env={**os.environ, **ENV},
    )  # fmt: skip
    assert made.stdout == LIST.read_text(encoding="utf-8")
