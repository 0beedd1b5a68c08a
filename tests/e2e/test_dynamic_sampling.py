"""Over-sampled runs through the whole product, killed while more was under way than is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.run.audit import audit
from tests.e2e.runs import RunFolder, finish, kill_when_held, start

FLAGS = ("--num-rollout", "3", "--over-sampling-batch-size", "24", "--skip-eval-before-train",
         "--eval-interval", "9", "--sglang-enable-deterministic-inference")  # fmt: skip
FILTER = (*FLAGS, "--dynamic-sampling-filter-path", "check_reward_nonzero_std")
PARTIAL = (*FLAGS, "--partial-rollout", "--rollout-max-response-len", "40")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_with_a_filter_trains_the_same_groups(tmp_path: Path) -> None:
    untouched, killed = RunFolder(tmp_path / "untouched"), RunFolder(tmp_path / "killed")
    finish(start(untouched, *FILTER), untouched)
    kill_when_held(start(killed, *FILTER, hold_at="generate-middle@1"), killed, "generate-middle@1")
    assert "resuming run" in finish(start(killed, *FILTER), killed)
    for run in (untouched, killed):
        found = audit(run.store)
        assert found.sound, found.problems
        assert (found.iterations, found.trained) == (3, 48)
    for pattern in ("groups/*/seal.json", "iterations/*/*.json"):
        assert killed.bodies(pattern) == untouched.bodies(pattern), pattern


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_partial_answers_survive_a_kill_and_end_once(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    kill_when_held(start(run, *PARTIAL, hold_at="generate-middle@1"), run, "generate-middle@1")
    back = run.document("groups/000000/seal.json")["body"]["returned"]
    assert "resuming run" in finish(start(run, *PARTIAL), run)
    found = audit(run.store)
    assert found.sound, found.problems
    assert (found.trained, found.lost, found.doubled) == (48, [], [])
    following = run.document("groups/000001/seal.json")["body"]
    ended = {group for group, *_ in following["groups"]}
    left = {group for group, _ in following.get("returned", [])}
    assert {group for group, _ in back} <= ended | left
