"""Ranks as plain processes: one answer for all, and an end of all with any."""

from __future__ import annotations

import os
import signal

import models
import pytest

from slime_core.cluster.rank_processes import RankProcesses
from slime_core.engines.launcher import free_port
from slime_core.errors import ConfigError, TrainerError
from slime_core.megatron.settings import TrainerSettings


def ranks(model: str, **options: int) -> RankProcesses:
    port = free_port()
    settings = [
        TrainerSettings(
            hf_checkpoint=model, rank=rank, local_rank=rank, world_size=2, master_port=port,
            collective_timeout_s=60.0, **options,
        )
        for rank in range(2)
    ]  # fmt: skip
    return RankProcesses(settings, 60.0)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_they_train_as_one_and_a_lost_one_ends_the_other(model: str) -> None:
    made = ranks(model, tensor_model_parallel_size=2)
    assert made.setup()["parameters"] > 0
    made.set_state("s0")
    batch = models.random_batch(models.VOCAB)
    assert made.train(0, "s0", "s1", "b", batch, 1, None)["state"] == "s1"
    pids = [process.pid for process in made._processes]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(TrainerError, match="ended during train"):
        made.train(0, "s1", "s2", "b", batch, 1, None)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_what_one_of_them_refuses_is_told_as_it_was_said(model: str) -> None:
    made = ranks(model)
    made.setup()
    with pytest.raises(TrainerError, match="the call expects"):
        made.train(0, "elsewhere", "s1", "b", models.random_batch(models.VOCAB), 1, None)
    wrong = ranks(model, tensor_model_parallel_size=3)
    with pytest.raises(ConfigError, match="not a multiple"):
        wrong.setup()
