"""Optimizer states in the host's memory: the numbers, and checkpoints both ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import memory_jobs
import pytest
from algorithm_runs import PPO, settings

from slime_core.batching.types import TrainBatch

SLOW = pytest.mark.slow
ON_HOST = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


def runs(run: Callable[..., Any], chosen: dict[str, Any], *batches: Any, folder: Path) -> list[Any]:
    """Without; with, where the second step is taken from the other's checkpoint again; and without
    from the checkpoint of that."""
    plain = {name: value for name, value in chosen.items() if name not in ON_HOST}
    device, host = str(folder / "device"), str(folder / "host")
    return [
        run(plain, batches, device, None),
        run(ON_HOST | chosen, batches, host, device),
        run(plain, batches, None, host),
    ]


def assert_same(device: dict[str, Any], host: dict[str, Any], back: dict[str, Any]) -> None:
    """Every metric and digest of every step."""
    assert all(host["host_bytes"])
    assert device["host_bytes"] == [0] * len(host["host_bytes"])
    assert len({step["weights_digest"] for step in device["steps"]}) == len(device["steps"]) == 3
    assert host["steps"] == device["steps"]
    assert host["again"] == back["again"] == device["steps"][1:]


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        pytest.param({}, {"dtype": "bfloat16"}, id="bf16"),
        pytest.param(PPO, {}, id="fp32, with a critic", marks=SLOW),
        pytest.param(PPO, {"dtype": "bfloat16"}, id="bf16, with a critic", marks=SLOW),
        pytest.param({}, {"optimizer_offload_fraction": 0.4}, id="fp32, in part", marks=SLOW),
        pytest.param(
            {},
            {"dtype": "bfloat16", "freeze_params_name_list": ["mlp"]},
            id="bf16, partly frozen",
            marks=SLOW,
        ),
    ],
)
def test_states_on_the_host_change_no_bit(
    algorithm: dict[str, Any],
    more: dict[str, Any],
    model: str,
    batch: TrainBatch,
    two_steps: TrainBatch,
    tmp_path: Path,
    in_trainer: Callable[..., Any],
) -> None:
    chosen = settings(model, **algorithm) | more
    run = partial(in_trainer, memory_jobs.offloaded)
    device, host, back = runs(run, chosen, batch, two_steps, folder=tmp_path)
    assert_same(device, host, back)
    assert len(host["host_bytes"]) == (2 if algorithm else 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_keep_their_shares_on_the_host(
    dtype: str,
    model: str,
    batch: TrainBatch,
    two_steps: TrainBatch,
    tmp_path: Path,
    in_ranks: Callable[..., list[Any]],
) -> None:
    chosen = settings(model) | {"dtype": dtype}
    run = partial(in_ranks, memory_jobs.offloaded_on_rank)
    for of_rank in zip(*runs(run, chosen, batch, two_steps, folder=tmp_path), strict=True):
        assert_same(*of_rank)
