"""Checks what Prefect, MLflow and metrics.jsonl show of a killed run, by SQL and JSON alone."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

ENDED = ("COMPLETED", "CRASHED", "FAILED", "CANCELLED")
PER_ITERATION = ("progress/iteration", "train/loss", "train/grad_norm", "rollout/raw_reward")


def audit_prefect(database: Path, run_id: str) -> list[str]:
    """One flow run of the training is completed, and none waits or runs for ever."""
    problems = []
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as open_database:
        flows = open_database.execute(
            "SELECT name, state_type, parent_task_run_id FROM flow_run"
        ).fetchall()
        tasks = open_database.execute("SELECT name, state_type FROM task_run").fetchall()
    for name, state, *_ in [*flows, *tasks]:
        if state not in ENDED:
            problems.append(f"Prefect shows {name} as {state} for ever")
    parents = [state for name, state, parent in flows if parent is None and name == run_id]
    if parents.count("COMPLETED") != 1:
        problems.append(f"Prefect shows {parents.count('COMPLETED')} completed flow runs, not 1")
    return problems


def audit_mlflow(
    database: Path, run: Path, run_id: str, iterations: int, evaluated: set[int]
) -> list[str]:
    """There is one finished run, with each metric once a step and with the ledger's numbers.

    Args:
        run: the run's folder in the store.
        evaluated: versions (iterations in the weights) that were evaluated.
    """
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as open_database:
        runs = open_database.execute(
            "SELECT runs.run_uuid, status FROM runs JOIN tags USING (run_uuid) "
            "WHERE tags.key = 'slime.run_id' AND tags.value = ?",
            (run_id,),
        ).fetchall()
        metrics = open_database.execute("SELECT key, step, value FROM metrics").fetchall()
    problems = []
    if [status for _, status in runs] != ["FINISHED"]:
        problems.append(f"MLflow has the runs {runs}, not one that is FINISHED")
    for (key, step), times in sorted(Counter((key, step) for key, step, _ in metrics).items()):
        if times > 1:
            problems.append(f"MLflow has {key} of step {step} {times} times")
    steps: dict[str, set[int]] = {}
    for key, step, _ in metrics:
        steps.setdefault(key, set()).add(step)
    for key in PER_ITERATION:
        if steps.get(key) != set(range(iterations)):
            problems.append(f"MLflow has {key} of the steps {sorted(steps.get(key, ()))}")
    for key in sorted(steps):
        if key.startswith("eval/") and steps[key] != evaluated:
            problems.append(f"MLflow has {key} of the versions {sorted(steps[key])}")
    values = {(key, step): value for key, step, value in metrics}
    return problems + _unlike_ledgers(run, iterations, values)


def audit_metrics_file(path: Path) -> list[str]:
    """No record stands in metrics.jsonl twice."""
    keys = Counter(json.loads(line)["key"] for line in path.read_text().splitlines())
    return [f"metrics.jsonl has {key} {times} times" for key, times in keys.items() if times > 1]


def _unlike_ledgers(run: Path, iterations: int, values: dict[tuple[str, int], float]) -> list[str]:
    problems = []
    for k in range(iterations):
        path = run / f"iterations/{k:06d}/ledger.json"
        if not path.is_file():
            continue
        steps = json.loads(path.read_text())["body"]["result"]["steps"]
        norms = [float(step["grad_norm"].removeprefix("f:")) for step in steps]
        expected = math.fsum(norms) / len(norms)
        found = values.get(("train/grad_norm", k), math.nan)
        if not math.isclose(found, expected, rel_tol=1e-12):
            problems.append(
                f"MLflow says grad_norm {found} of iteration {k}, its ledger {expected}"
            )
    return problems
