"""The quickstart as a user meets it: `python -m benchmarks.quickstart [--seeds 1 2 3]`.

For each seed it starts `slime train configs/quickstart.yaml` in a new workspace and measures:
seconds from the command to the first trained iteration, seconds from there to the last evaluation, the largest memory of all its processes (PSS, /dev/shm included), the largest canary
difference, and the held-out accuracies at the end. Prints one table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLE_S = 0.5
GIB = 2**30


@dataclass(frozen=True)
class Reading:
    """What one run showed."""

    first_s: float
    rest_s: float
    memory_bytes: int
    canary: float
    greedy: float
    sampled: float


def run(config: str, seed: int, iterations: int, workspace: Path) -> Reading:
    """Trains once and reads its metrics file as it grows."""
    shm_before = psutil.disk_usage("/dev/shm").used
    command = [sys.executable, "-m", "flows.cli.main", "train", config, "--new"]
    command += ["--seed", str(seed), "--num-rollout", str(iterations)]
    start = time.monotonic()
    process = subprocess.Popen([*command, "--workspace", str(workspace)], stdout=subprocess.DEVNULL)
    first_s, memory_bytes = 0.0, 0
    while process.poll() is None:
        if not first_s and records(workspace, "iterations/"):
            first_s = time.monotonic() - start
        memory_bytes = max(memory_bytes, memory(process.pid, shm_before))
        time.sleep(SAMPLE_S)
    if process.returncode:
        raise SystemExit(f"the run of seed {seed} ended with status {process.returncode}")
    evals, trained = records(workspace, "evals/"), records(workspace, "iterations/")
    rest_s = max(r["time_s"] for r in [*evals, *trained]) - trained[0]["time_s"]
    canary = max(r["metrics"]["sync/canary_abs_diff"] for r in trained)
    return Reading(
        first_s,
        rest_s,
        memory_bytes,
        canary,
        last_value(evals, "eval/greedy"),
        last_value(evals, "eval/sampled"),
    )


def records(workspace: Path, prefix: str) -> list[dict]:
    """Lines of metrics.jsonl whose key starts with a prefix; a line still being written waits."""
    found = []
    for path in workspace.glob("local/*/metrics.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                record = json.loads(line)
                if record["key"].startswith(prefix):
                    found.append(record)
    return found


def last_value(evals: list[dict], name: str) -> float:
    return [r["metrics"][name] for r in evals if name in r["metrics"]][-1]


def memory(pid: int, shm_before: int) -> int:
    """PSS of a process and all its descendants, and what /dev/shm has grown by, in bytes."""
    total = max(0, psutil.disk_usage("/dev/shm").used - shm_before)
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return total
    for process in family:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=60)
    options = parser.parse_args()
    readings = []
    print("seed  first s  rest s  memory GiB  canary   greedy  sampled")
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            r = run(options.config, seed, options.iterations, Path(folder))
        readings.append(r)
        print(
            f"{seed:>4}  {r.first_s:7.1f}  {r.rest_s:6.1f}  {r.memory_bytes / GIB:10.2f}  "
            f"{r.canary:.1e}  {r.greedy:6.3f}  {r.sampled:7.3f}",
            flush=True,
        )
    mean = statistics.fmean
    print(
        f"mean  {mean(r.first_s for r in readings):7.1f}  {mean(r.rest_s for r in readings):6.1f}  "
        f"{max(r.memory_bytes for r in readings) / GIB:10.2f}  "
        f"{max(r.canary for r in readings):.1e}  {mean(r.greedy for r in readings):6.3f}  "
        f"{mean(r.sampled for r in readings):7.3f}"
    )


if __name__ == "__main__":
    main()
