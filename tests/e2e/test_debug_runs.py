"""slime's two halves for debugging: samples without a trainer, and training without engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.store.backend import open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.verify import verify_run
from tests.e2e.runs import RunFolder, finish, kill_when_held, start

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
FLAGS = ("--no-prefect", "--num-rollout", "3", "--sglang-enable-deterministic-inference")
NO_EVAL = ("--eval-interval", "100", "--skip-eval-before-train")


def metrics(run: RunFolder) -> list[dict]:
    lines = (run.workspace / "local" / run.run_id / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def kinds(run: RunFolder) -> set[str]:
    return {path.name for path in run.store.glob("iterations/*/*.json")}


def test_samples_of_a_run_without_a_trainer_are_trained_by_one_without_engines(
    tmp_path: Path,
) -> None:
    dumps = str(tmp_path / "dumps" / "{rollout_id}.pt")
    made = RunFolder(tmp_path / "a", "made")
    flags = (*FLAGS, "--debug-rollout-only", "--save-debug-rollout-data", dumps)
    held = start(made, *flags, hold_at="pack@1")
    kill_when_held(held, made, "pack@1")
    output = finish(start(made, *flags), made)
    assert "trainer up" not in output and "none (--debug-rollout-only)" in output
    assert kinds(made) == {"batch.json"} and len(made.bodies("iterations/*/batch.json")) == 3
    records = [one for one in metrics(made) if one["key"].startswith("iterations/")]
    assert [one["step"] for one in records] == [0, 1, 2]
    assert all("rollout/raw_reward" in one["metrics"] for one in records)
    assert not [name for one in records for name in one["metrics"] if name.startswith("train/")]
    evaluated = {path.parent.name for path in made.store.glob("evals/*/*.json")}
    assert evaluated == {"l0-0"}, "its one version, once"
    assert "is finished" in finish(start(made, *flags), made)
    assert verify_run(NodeCache(open_backend(str(made.store)))) == []

    trained = RunFolder(tmp_path / "b", "trained")
    flags = (*FLAGS, "--debug-train-only", "--load-debug-rollout-data", dumps)
    output = finish(start(trained, *flags), trained)
    assert "engines up" not in output and not list(trained.workspace.rglob("engine-*.log"))
    assert kinds(trained) == {"batch.json", "ledger.json", "sync.json"}
    assert not list(trained.store.glob("evals/*/*"))
    assert [d["rewards"] for d in trained.bodies("iterations/*/batch.json").values()] == [
        d["rewards"] for d in made.bodies("iterations/*/batch.json").values()
    ]
    assert verify_run(NodeCache(open_backend(str(trained.store)))) == []
