"""Fences, states, taint and kept results of a trainer rank, with a stand-in for the trainer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from slime_core.batching.types import TrainBatch, offsets_of
from slime_core.errors import StaleOwnerError, TrainerError
from slime_core.megatron.rank import TrainerRank, mean_metrics
from slime_core.megatron.settings import TrainerSettings


def tiny_batch() -> TrainBatch:
    one, zero = np.ones(1), np.zeros(1, np.int64)
    return TrainBatch(
        tokens=np.arange(2, dtype=np.int32),
        token_offsets=offsets_of([2]),
        response_lengths=np.ones(1, np.int64),
        loss_mask=np.ones(1, np.uint8),
        rollout_log_probs=np.zeros(1, np.float32),
        response_offsets=offsets_of([1]),
        rewards=one,
        raw_rewards=one,
        group_ids=zero,
        rollout_ids=zero,
        denominators=one,
        steps=((0,),),
        truncated=np.zeros(1, np.uint8),
    )


class StubTrainer:
    """Counts trainings; blocks or fails when told to."""

    num_parameters = 7

    def __init__(self, settings: TrainerSettings) -> None:
        self.trained = 0
        self.error: Exception | None = None
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def start_digest(self) -> str:
        return self.weights_digest()

    def weights_digest(self) -> str:
        return f"actor:{self.trained:016x}"

    def agree(self, *parts: str) -> bool:
        return True

    def train(
        self,
        batch: TrainBatch,
        seed: int,
        forced_skips: Sequence[bool] | None,
        before_step: Callable[[int], None] | None,
    ) -> dict[str, Any]:
        self.entered.set()
        assert self.go_on.wait(10)
        if before_step is not None:
            before_step(0)
        if self.error is not None:
            raise self.error
        self.trained += 1
        step = {"loss": float(seed), "lr": 0.1, "skipped": False, "tokens": 1, "micro_batches": 1}
        step["weights_digest"] = self.weights_digest()
        return {"steps": [step], "seconds": {}}

    def canary(self, tokens: Sequence[int]) -> list[float]:
        return [-1.0] * (len(tokens) - 1)

    def export_hf(self, directory: str, version: str) -> dict[str, Any]:
        raise TrainerError("disk is full")

    def load(self, directory: str) -> dict[str, Any]:
        if directory == "damaged":
            raise TrainerError("damaged")
        return {"state": "s9"}


@pytest.fixture
def rank() -> TrainerRank:
    built = TrainerRank(TrainerSettings(hf_checkpoint="x"), build=StubTrainer)  # type: ignore[arg-type]
    assert built.setup() == {"weights_digest": "actor:0000000000000000", "parameters": 7}
    built.set_state("s0")
    return built


def stub_of(rank: TrainerRank) -> StubTrainer:
    return rank._trainer  # type: ignore[return-value]


def train(rank: TrainerRank, epoch: int = 1, expect: str = "s0", to: str = "s1") -> dict[str, Any]:
    return rank.train(epoch, expect, to, f"batch-{to}", tiny_batch(), seed=3)


@pytest.fixture
def busy(rank: TrainerRank) -> Iterator[tuple[TrainerRank, threading.Thread]]:
    """A rank in the middle of train, and the thread that trains."""
    stub = stub_of(rank)
    stub.go_on.clear()
    thread = threading.Thread(target=train, args=(rank,))
    thread.start()
    assert stub.entered.wait(10)
    yield rank, thread
    stub.go_on.set()
    thread.join(10)


def test_training_moves_the_state_and_keeps_the_result(rank: TrainerRank) -> None:
    result = train(rank)
    assert (result["state"], result["batch_digest"]) == ("s1", "batch-s1")
    assert result["steps"][0]["loss"] == 3.0
    assert rank.result_of("s1") == result
    assert rank.result_of("s2") is None
    assert rank.status() == {
        "epoch": 1,
        "state": "s1",
        "busy": False,
        "call": None,
        "batch_digest": None,
        "asleep": False,
        "tainted": False,
        "reason": None,
    }


def test_another_state_is_refused_and_nothing_is_trained(rank: TrainerRank) -> None:
    train(rank)
    with pytest.raises(TrainerError, match="state 's1', the call expects 's0'"):
        train(rank)
    assert stub_of(rank).trained == 1
    assert not rank.status()["tainted"]
    train(rank, expect="s1", to="s2")


def test_a_lower_epoch_is_refused_everywhere(rank: TrainerRank) -> None:
    assert rank.fence(5) == 5
    for call in (lambda: rank.fence(4), lambda: train(rank, epoch=4)):
        with pytest.raises(StaleOwnerError, match="epoch 4 called the trainer, but epoch 5"):
            call()
    assert stub_of(rank).trained == 0
    train(rank, epoch=6)
    with pytest.raises(StaleOwnerError):
        rank.fence(5)


def test_status_and_fence_answer_while_training(
    busy: tuple[TrainerRank, threading.Thread],
) -> None:
    rank, thread = busy
    status = rank.status()
    assert (status["busy"], status["call"], status["state"]) == (True, "train", "s0")
    assert status["batch_digest"] == "batch-s1"
    rank.fence(9)
    for call in (lambda: train(rank, epoch=9), lambda: rank.canary([1, 2])):
        with pytest.raises(TrainerError, match="busy with train"):
            call()
    with pytest.raises(TrainerError, match="busy"):
        rank.set_state("s5")
    stub_of(rank).go_on.set()
    thread.join(10)
    # What was begun for an older owner is finished, and the new owner can read it.
    assert (rank.status()["state"], rank.status()["epoch"]) == ("s1", 9)
    assert rank.result_of("s1") is not None


@pytest.mark.parametrize("where", ["training", "before_step"])
def test_any_exception_in_training_taints(rank: TrainerRank, where: str) -> None:
    def fail(step: int) -> None:
        raise RuntimeError("no memory")

    if where == "training":
        stub_of(rank).error = RuntimeError("no memory")
    with pytest.raises(RuntimeError):
        rank.train(1, "s0", "s1", "b", tiny_batch(), 0, before_step=fail)
    status = rank.status()
    assert (status["tainted"], status["state"], status["busy"]) == (True, "s0", False)
    assert "no memory" in status["reason"]
    for call in (lambda: train(rank), lambda: rank.canary([1, 2]), lambda: rank.load("c")):
        with pytest.raises(TrainerError, match="tainted and must be replaced"):
            call()


def test_a_failed_load_taints_and_a_failed_export_does_not(rank: TrainerRank) -> None:
    with pytest.raises(TrainerError, match="disk is full"):
        rank.export_hf("d", "v")
    assert not rank.status()["tainted"]
    assert rank.load("fine")["state"] == "s9" == rank.status()["state"]
    with pytest.raises(TrainerError, match="damaged"):
        rank.load("damaged")
    assert rank.status()["tainted"]


def test_only_recent_results_are_kept(rank: TrainerRank) -> None:
    for i in range(10):
        train(rank, expect=f"s{i}", to=f"s{i + 1}")
    assert rank.result_of("s10") is not None
    assert rank.result_of("s1") is None


def test_use_before_setup_and_setup_twice(rank: TrainerRank) -> None:
    with pytest.raises(TrainerError, match="setup was called twice"):
        rank.setup()
    fresh = TrainerRank(TrainerSettings(hf_checkpoint="x"), build=StubTrainer)  # type: ignore[arg-type]
    with pytest.raises(TrainerError, match="call setup first"):
        fresh.canary([1, 2])


def test_metrics_of_an_iteration_leave_skipped_steps_out() -> None:
    def step(loss: float, skipped: bool) -> dict[str, Any]:
        return {
            "loss": loss,
            "gap_max": loss,
            "lr": loss,
            "skipped": skipped,
            "tokens": 2,
            "micro_batches": 1,
        }

    steps = [step(1.0, False), step(float("nan"), True), step(3.0, False)]
    found = mean_metrics(steps)
    assert found == {
        "loss": 2.0,
        "gap_max": 3.0,
        "lr": 3.0,
        "tokens": 6,
        "micro_batches": 3,
        "skipped_steps": 1,
    }
    assert mean_metrics([step(float("nan"), True)])["skipped_steps"] == 1
