"""Supervised training through the whole loop: answers of the data are learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import RunFolder, finish, start

FLAGS = (
    *("--num-rollout", "10", "--eval-interval", "10", "--loss-type", "sft_loss"),
    *("--custom-generate-function-path", "slime_core.rollout.sft.generate"),
    *("--rollout-batch-size", "128", "--n-samples-per-prompt", "1"),
)


@pytest.mark.e2e
@pytest.mark.slow
def test_labels_are_learned(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    finish(start(run, *FLAGS), run)
    lines = (tmp_path / "local" / run.run_id / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    losses = [found["train/loss"] for found in metrics if "train/loss" in found]
    assert len(losses) == 10 and losses[-1] < 0.5 * losses[0]
    greedy = [found["eval/greedy"] for found in metrics if "eval/greedy" in found]
    assert len(greedy) == 2 and greedy[1] > greedy[0] + 0.3
