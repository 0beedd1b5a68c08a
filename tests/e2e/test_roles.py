"""Runs with a reference and a critic, killed in mid training, against runs that nobody touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import RunFolder, finish, kill_when_held, start

FLAGS = (
    *("--num-rollout", "8", "--eval-interval", "8", "--save-interval", "4"),
    *("--num-steps-per-rollout", "2", "--sglang-enable-deterministic-inference"),
)
# The reference moves after iterations 2 and 5: one move lies in the checkpoint, one in the replay.
KL_LOSS = (
    *("--use-kl-loss", "--kl-loss-coef", "0.05", "--kl-loss-type", "low_var_kl"),
    *("--ref-update-interval", "3"),
)
CRITIC = (
    *("--advantage-estimator", "ppo", "--critic-lr", "1e-3", "--num-critic-only-steps", "2"),
    *("--kl-coef", "0.02", "--ref-update-interval", "3"),
)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flags", [KL_LOSS, CRITIC], ids=["kl-loss", "critic"])
def test_a_killed_run_ends_with_the_same_weights(flags: tuple[str, ...], tmp_path: Path) -> None:
    untouched, killed = RunFolder(tmp_path / "untouched"), RunFolder(tmp_path / "killed")
    finish(start(untouched, *FLAGS, *flags), untouched)
    point = "train-middle@6"
    kill_when_held(start(killed, *FLAGS, *flags, hold_at=point), killed, point)
    assert "resuming run" in finish(start(killed, *FLAGS, *flags), killed)
    for pattern in ("groups/*/seal.json", "iterations/*/*.json", "evals/**/*.json"):
        assert killed.bodies(pattern) == untouched.bodies(pattern), pattern
    steps = [
        step
        for k in range(8)
        for step in untouched.document(f"iterations/{k:06d}/ledger.json")["body"]["result"]["steps"]
    ]
    assert len({step["weights_digest"] for step in steps}) == len(steps) == 16
    assert not any(step["skipped"] for step in steps)
