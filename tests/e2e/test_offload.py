"""A trainer that sleeps while engines generate, against one that stays awake."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import RunFolder, finish, start

FLAGS = (
    *("--no-prefect", "--no-use-mlflow", "--device", "cpu", "--num-rollout", "3"),
    *("--eval-interval", "3", "--sglang-enable-deterministic-inference"),
)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_that_sleeps_trains_the_same_weights(tmp_path: Path) -> None:
    """Asynchronous saves end while it sleeps."""
    awake, turns = RunFolder(tmp_path / "awake"), RunFolder(tmp_path / "turns")
    finish(start(awake, *FLAGS), awake)
    saves = ("--save-interval", "1", "--async-save")
    finish(start(turns, *FLAGS, "--offload-train", *saves), turns)
    for pattern in ("groups/*/seal.json", "iterations/*/*.json", "evals/**/*.json"):
        assert turns.bodies(pattern) == awake.bodies(pattern) != {}, pattern
    log = turns.workspace / "local" / turns.run_id / "logs" / "trainer-0.log"
    # The initial evaluation and the first generation share a sleep; the last evaluation has one. A
    # repair of an engine, as a busy machine may bring about, wakes it for a while.
    assert log.read_text().count("asleep: ") >= 4
