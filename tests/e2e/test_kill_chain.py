"""One run, killed twice at exact moments, against a run that nobody touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.run.audit import audit
from tests.e2e.runs import RunFolder, finish, kill_when_held, start

ITERATIONS = 10
ROWS = sum(1 for _ in (Path(__file__).parents[2] / "configs/quickstart/train.jsonl").open())
FLAGS = (
    *("--num-rollout", str(ITERATIONS), "--eval-interval", "5", "--save-interval", "4"),
    *("--sglang-enable-deterministic-inference",),
)
TWO = ("generate-middle@3", "train-middle@7")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = RunFolder(tmp_path_factory.mktemp("untouched"))
    finish(start(run, *FLAGS), run)
    return run


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_two_kills_lose_nothing(untouched: RunFolder, tmp_path: Path) -> None:
    check_chain(RunFolder(tmp_path), untouched, TWO)


def check_chain(run: RunFolder, untouched: RunFolder, points: tuple[str, ...]) -> None:
    for point in points:
        kill_when_held(start(run, *FLAGS, hold_at=point), run, point)
    output = finish(start(run, *FLAGS), run)
    assert "resuming run" in output

    for folder in (run, untouched):
        found = audit(folder.store, dataset_rows=ROWS)
        assert found.sound, found.problems
        assert (found.lost, found.doubled, found.skipped) == ([], [], [])
        assert (found.iterations, found.open) == (ITERATIONS, 0)

    # The same groups, batches, training and evaluations, to the last bit of the weights.
    for pattern in ("groups/*/seal.json", "iterations/*/*.json", "evals/**/*.json"):
        assert run.bodies(pattern) == untouched.bodies(pattern), pattern
    last = run.document(f"iterations/{ITERATIONS - 1:06d}/ledger.json")["body"]
    assert last["result"]["steps"][-1]["weights_digest"]
