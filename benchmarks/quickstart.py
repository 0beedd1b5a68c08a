"""The quickstart as a newcomer meets it: `python -m benchmarks.quickstart [--seeds 1 2 3]`.

Prints for each seed the held-out accuracy at the end, the seconds from the command to the first
iteration and from there to the end, the largest canary difference, and the peak of memory (PSS of
all processes, and what /dev/shm holds beyond the start).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

SAMPLE_INTERVAL_S = 2.0


def tree_bytes(pid: int) -> int:
    """Proportional set size of a process and all below it."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def shared_bytes() -> int:
    """Bytes in use in /dev/shm, where Ray keeps objects that PSS does not see."""
    state = os.statvfs("/dev/shm")
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def run(workspace: Path, seed: int, flags: list[str]) -> dict[str, Any]:
    """Trains once and returns what was measured."""
    command = [sys.executable, "-m", "flows.cli.main", "train", "configs/quickstart.yaml"]
    command += ["--new", "--workspace", str(workspace), "--seed", str(seed), *flags]
    before, began, shared, peak = set(workspace.glob("local/*")), time.time(), shared_bytes(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            peak = max(peak, tree_bytes(process.pid) + shared_bytes() - shared)
        except psutil.NoSuchProcess:
            break
        time.sleep(SAMPLE_INTERVAL_S)
    if process.wait() != 0:
        raise SystemExit(f"the run with seed {seed} failed")
    [folder] = set(workspace.glob("local/*")) - before
    return measured(folder / "metrics.jsonl", began) | {"peak_gb": peak / 1e9}


def measured(metrics: Path, began: float) -> dict[str, Any]:
    """What metrics.jsonl says about a run that began at this Unix time."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    iterations = [record for record in records if record["key"].startswith("iterations/")]
    evaluations = [record for record in records if record["key"].startswith("evals/")]
    last = max(record["step"] for record in evaluations)
    scores: dict[str, float] = {}
    for record in evaluations:
        if record["step"] == last:
            scores |= {
                name.removeprefix("eval/"): value
                for name, value in record["metrics"].items()
                if name.count("/") == 1
            }
    first = iterations[0]["time_s"] - iterations[0]["metrics"]["perf/step_time"]
    return {
        **scores,
        "start_s": first - began,
        "loop_s": records[-1]["time_s"] - first,
        "canary": max(record["metrics"]["sync/canary_abs_diff"] for record in iterations),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for slime train")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(options.seeds):
            found = run(Path(folder), seed, options.flags)
            kind = "first ever" if number == 0 else "later"
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in found.items())
            print(f"seed {seed} ({kind} start)  {numbers}", flush=True)


if __name__ == "__main__":
    main()
