"""The load of a machine as metrics."""

import pytest

from slime_core.tracking.system import gpu_load, measured

TWO = """0, 37, 1024, 143771, 221.53
1, [N/A], 0, 143771, [Not Supported]
"""


@pytest.fixture
def program(tmp_path):
    """Stands for nvidia-smi."""

    def made(text: str, status: int = 0) -> str:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {status}\n")
        path.chmod(0o755)
        return str(path)

    return made


def test_each_gpu_has_what_is_known_of_it(program):
    assert gpu_load(program(TWO)) == {
        "system/gpu_0_utilization_percentage": 37.0,
        "system/gpu_0_memory_usage_megabytes": pytest.approx(1073.741824),
        "system/gpu_0_memory_usage_percentage": pytest.approx(100 * 1024 / 143771),
        "system/gpu_0_power_usage_watts": 221.53,
        "system/gpu_1_memory_usage_megabytes": 0.0,
        "system/gpu_1_memory_usage_percentage": 0.0,
    }


def test_a_machine_without_a_gpu_has_no_such_figures(program):
    assert gpu_load(program("No devices were found\n", status=6)) == {}
    assert gpu_load("/nowhere/nvidia-smi") == {}
    assert not [name for name in measured() if "gpu" in name]
