"""What an iteration costs besides generating and training: `python -m benchmarks.overhead`.

Runs the quickstart twice, with Prefect and through its stages alone, and prints for each the median
and the 90th percentile of (wall of an iteration - generate stage - seconds on the trainer's ranks).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

WARM_UP = 3
FAR = "1000000"


def measure(config: str, iterations: int, prefect: bool, workspace: Path) -> list[float]:
    """Overhead in seconds of each iteration after the warm-up."""
    command = [sys.executable, "-m", "flows.cli.main", "train", config]
    command += ["--workspace", str(workspace), "--num-rollout", str(iterations)]
    command += ["--eval-interval", FAR, "--skip-eval-before-train"]
    command += [] if prefect else ["--no-prefect"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    [metrics] = workspace.glob("local/*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    iteration_records = [record for record in records if record["key"].startswith("iterations/")]
    found = []
    for before, after in pairwise(iteration_records):
        numbers = after["metrics"]
        computed = sum(
            numbers[name]
            for name in ("perf/rollout_time", "perf/log_probs_time", "perf/actor_train_time")
        )
        found.append(after["time_s"] - before["time_s"] - computed)
    return found[WARM_UP:]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--only", choices=("prefect", "stages"), help="measure one of the two")
    options = parser.parse_args()
    for name in ("prefect", "stages"):
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = measure(options.config, options.iterations, name == "prefect", Path(folder))
        print(
            f"{name:<8} median {statistics.median(found):.3f} s  p90 {percentile(found, 0.9):.3f} s"
            f"  max {max(found):.3f} s  n {len(found)}"
        )


if __name__ == "__main__":
    main()
