"""A trainer that sleeps frees what it holds, and goes on as if it had not slept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import memory_jobs
import pytest
from algorithm_runs import PPO, settings

from slime_core.batching.types import TrainBatch

ROLES = {"kl_loss_coef": 0.1, "keep_old_actor": True, "old_actor_update_interval": 2}
SLOW = pytest.mark.slow
LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {}, "tp2": {"tensor_model_parallel_size": 2}}


def assert_slept_well(slept: dict[str, Any], awake: dict[str, Any], sleeps: int) -> None:
    """Nothing is held in sleep, and every number is that of the run without."""
    assert slept["held"] == [0] * sleeps
    assert all(kept > 0 for kept in slept["kept"])
    assert all(before == after for before, after in slept["digests"])
    assert [r["steps"] for r in slept["results"]] == [r["steps"] for r in awake["results"]]


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        pytest.param({}, {}, id="fp32", marks=SLOW),
        pytest.param({}, {"dtype": "bfloat16"}, id="bf16"),
        pytest.param(PPO | ROLES, {}, id="critic, reference, old actor", marks=SLOW),
    ],
)
def test_sleep_frees_everything_and_changes_no_bit(
    algorithm: dict[str, Any],
    more: dict[str, Any],
    model: str,
    reference: str,
    batch: TrainBatch,
    two_steps: TrainBatch,
    in_trainer: Callable[..., Any],
) -> None:
    """Before the first step, when there are no moments yet, and between later ones."""
    if algorithm:
        algorithm = algorithm | {"ref_load": reference}
    chosen, batches = settings(model, **algorithm) | more, [two_steps, batch, two_steps]
    awake = in_trainer(memory_jobs.naps, chosen, batches, [])
    slept = in_trainer(memory_jobs.naps, chosen, batches, [0, 1, 2])
    assert_slept_well(slept, awake, sleeps=3)
    assert slept["kept"][0] < slept["kept"][1] == slept["kept"][2]


@pytest.mark.slow
def test_twenty_sleeps_leave_nothing_behind(
    model: str, batch: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    chosen = settings(model, **PPO)
    found = in_trainer(memory_jobs.naps, chosen, [batch, batch], [1], 20)
    assert len(found["left"]) == 20
    assert len(set(found["left"])) == 1, "bytes of live tensors, awake and asleep"
    assert len(set(found["kept"])) == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_two_ranks_sleep_and_go_on(
    layout: str, model: str, batch: TrainBatch, in_ranks: Callable[..., list[Any]]
) -> None:
    chosen = settings(model) | LAYOUTS[layout] | {"dtype": "bfloat16"}
    awake = in_ranks(memory_jobs.naps_on_rank, chosen, [batch, batch], [])
    slept = in_ranks(memory_jobs.naps_on_rank, chosen, [batch, batch], [1])
    for ours, theirs in zip(slept, awake, strict=True):
        assert_slept_well(ours, theirs, sleeps=1)


def test_whatever_needs_weights_wakes_the_trainer(
    model: str, batch: TrainBatch, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    found = in_trainer(memory_jobs.woken_by, settings(model), batch, str(tmp_path))
    for call, (awake, woken, asleep) in found.items():
        assert awake == woken, call
        assert not asleep, call


def test_sleep_and_a_checkpoint_in_the_making(
    model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    found = in_trainer(memory_jobs.sleeps_in_a_save, settings(model), str(tmp_path))
    assert found["asleep"], "a checkpoint from copies is finished in sleep"
    assert "still reads the weights" in found["error"]
    assert found["status"] == (False, False)
    assert found["digests"][0] == found["digests"][1]


def test_a_host_without_room_is_named(model: str, in_trainer: Callable[..., Any]) -> None:
    said = in_trainer(memory_jobs.sleeps_without_room, settings(model))
    assert said.startswith("the trainer cannot sleep: the host has no room for its ")
    assert said.endswith("leave offload_train out")
