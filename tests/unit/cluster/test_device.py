from pathlib import Path

import pytest

from slime_core.cluster.device import resolve_device, visible_gpus
from slime_core.config.loading import load_config
from slime_core.errors import ConfigError

CONFIG = Path(__file__).parents[3] / "configs/quickstart.yaml"


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "resolved"),
    [
        ("auto", 1, 0, "cpu"),
        ("auto", 1, 1, "cuda"),
        ("auto", 2, 2, "cuda"),
        ("cuda", 2, 8, "cuda"),
        ("cpu", 2, 0, "cpu"),
        ("cpu", 2, 1, "cpu"),
    ],
)
def test_the_device_follows_what_the_machine_shows(tmp_path, device, ranks, gpus, resolved):
    assert resolve_device(*machine(tmp_path, device, ranks, gpus)) == resolved


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "reason"),
    [
        ("cuda", 1, 0, "no NVIDIA GPU"),
        ("auto", 2, 0, "shows 0 NVIDIA GPUs"),
        ("auto", 4, 2, "actor_num_gpus_per_node 4: this machine shows 2 NVIDIA GPUs"),
        ("cuda", 4, 2, "--device cpu"),
    ],
)
def test_a_rank_without_a_gpu_of_its_own_is_refused(tmp_path, device, ranks, gpus, reason):
    with pytest.raises(ConfigError, match=reason):
        resolve_device(*machine(tmp_path, device, ranks, gpus))


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("0,1,2", 2), ("0,-1,1", 1)],
)
def test_a_hidden_gpu_does_not_count(tmp_path, monkeypatch, visible, gpus):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config, devices = machine(tmp_path, "auto", 1, 2)
    assert visible_gpus(devices) == gpus
    assert resolve_device(config, devices) == ("cuda" if gpus else "cpu")


def machine(folder, device, ranks, gpus):
    for index in range(gpus):
        (folder / f"nvidia{index}").touch()
    (folder / "nvidiactl").touch()
    overrides = {"device": device, "actor_num_gpus_per_node": ranks}
    return load_config(CONFIG, overrides), folder
