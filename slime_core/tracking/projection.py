"""From store documents to metrics: pure functions, so any record can be made again at any time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STAGE_METRICS = {"generate": "perf/rollout_time", "sync": "perf/update_weights_time"}
TRAINER_METRICS = {"log_probs": "perf/log_probs_time", "steps": "perf/actor_train_time"}
WORKING_STAGES = ("train",)
GROUPS = ("rollout/", "train/", "perf/", "eval/", "sync/", "progress/", "multi_turn/", "passrate/")


@dataclass(frozen=True)
class Record:
    """What one iteration or one evaluation says.

    Attributes:
        key: its name in the store without suffix; a tracker gets each key once.
        step: iterations contained in the weights that made the numbers.
        time_s: Unix time of the record.
        metrics: finite or not, by name.
    """

    key: str
    step: int
    time_s: float
    metrics: dict[str, float]

    @property
    def is_iteration(self) -> bool:
        return self.key.startswith("iterations/")

    def to_json(self) -> dict[str, Any]:
        numbers = {name: _to_json(value) for name, value in self.metrics.items()}
        return {"key": self.key, "step": self.step, "time_s": self.time_s, "metrics": numbers}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Record:
        numbers = {name: float(value) for name, value in line["metrics"].items()}
        return cls(line["key"], line["step"], line["time_s"], numbers)


def iteration_record(
    key: str,
    iteration: int,
    time_s: float,
    batch: dict[str, Any],
    batch_by: dict[str, Any],
    ledger: tuple[dict[str, Any], dict[str, Any]] | None,
    sync: tuple[dict[str, Any], dict[str, Any]] | None,
    rollout_gpus: int,
) -> Record:
    """Projects an iteration's documents.

    Args:
        key: the record's key.
        iteration: its number, which is also the weight version that generated its batch.
        time_s: Unix time of the record.
        batch, batch_by: body and `by` of batch.json.
        ledger: body and `by` of ledger.json; None where nothing is trained.
        sync: body and `by` of sync.json; None where the run ended before it.
        rollout_gpus: GPUs (on CPU: processes) of all engines.
    """
    metrics = {"progress/iteration": float(iteration)}
    metrics |= _prefixed("rollout/", batch.get("metrics", {}))
    metrics |= _prefixed("rollout/", batch_by.get("measured", {}))
    seconds = dict(batch_by.get("seconds", {}))
    ledger_by: dict[str, Any] = {}
    if ledger is not None:
        body, ledger_by = ledger
        metrics |= _steps(body["result"]["steps"])
        seconds = {"train": ledger_by.get("wall_s", 0.0), **ledger_by.get("seconds", {})}
    if sync is not None:
        body, by = sync
        seconds |= by.get("seconds", {})
        metrics["progress/weight_version"] = float(iteration + 1)
        for source, name in (("canary", "sync/canary_abs_diff"), ("engines", "sync/engines")):
            if (value := by.get(source, body.get(source))) is not None:
                metrics[name] = float(value)
    metrics |= _seconds(seconds)
    for part, value in ledger_by.get("train_seconds", {}).items():
        metrics[TRAINER_METRICS.get(part, f"perf/train_{part}_time")] = float(value)
    metrics |= _throughput(metrics, rollout_gpus)
    return Record(key, iteration, time_s, metrics)


def evaluation_record(key: str, time_s: float, body: dict[str, Any]) -> Record:
    """Projects an evaluation; its step is the number in its weight version."""
    dataset, version = str(body["dataset"]), str(body["version"])
    metrics = {f"eval/{dataset}/missed": 1.0} if "missed" in body else {}
    for name, value in body.get("metrics", {}).items():
        metrics[f"eval/{dataset}/{name}"] = float(value)
        if name in ("reward", "mean_reward"):
            metrics[f"eval/{dataset}"] = float(value)
    return Record(key, int(version.rsplit("-", 1)[-1]), time_s, metrics)


def _prefixed(prefix: str, numbers: dict[str, Any]) -> dict[str, float]:
    return {
        name if name.startswith(GROUPS) else prefix + name: float(value)
        for name, value in numbers.items()
        if _is_number(value)
    }


def _steps(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means over the optimizer steps that were not skipped; the last learning rate."""
    done = [step for step in steps if not step.get("skipped")]
    found = {
        "train/steps": float(len(steps)),
        "train/skipped_steps": float(len(steps) - len(done)),
    }
    names = {name for step in done for name, value in step.items() if _is_number(value)}
    for name in sorted(names - {"skipped", "lr"}):
        values = [float(step[name]) for step in done if _is_number(step.get(name))]
        found |= _prefixed("train/", {name: math.fsum(values) / len(values)})
    if steps and "lr" in steps[-1]:
        found["train/lr"] = float(steps[-1]["lr"])
    return found


def _seconds(seconds: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for stage, value in seconds.items():
        found[STAGE_METRICS.get(stage, f"perf/{stage}_time")] = float(value)
    total = math.fsum(float(value) for value in seconds.values())
    found["perf/step_time"] = total
    working = math.fsum(float(seconds.get(stage, 0.0)) for stage in WORKING_STAGES)
    if total > 0:
        found["perf/wait_time_ratio"] = 1 - working / total
    return found


def _throughput(metrics: dict[str, float], rollout_gpus: int) -> dict[str, float]:
    """Tokens of the batch, all, trained ones and the longest response, by generation time."""
    seconds = metrics.get("perf/rollout_time", 0.0)
    if seconds <= 0:
        return {}
    rates = (
        ("perf/tokens_per_gpu_per_sec", "rollout/response_tokens", rollout_gpus),
        ("perf/effective_tokens_per_gpu_per_sec", "rollout/trained_tokens", rollout_gpus),
        ("perf/longest_sample_tokens_per_sec", "rollout/response_len/max", 1),
    )
    return {name: metrics[tokens] / seconds / by for name, tokens, by in rates if tokens in metrics}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _to_json(value: float) -> float | str:
    """NaN and infinities as text: JSON has no numbers for them, and float() reads them back."""
    return value if math.isfinite(value) else str(value)
