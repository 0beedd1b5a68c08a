"""Metrics follow from the documents, by known values."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.tracking.projection import Record, evaluation_record, iteration_record
from slime_core.tracking.registry import METRICS, find, sanitised

BEFORE = {"sample": 0.25, "generate": 4.0, "reward": 0.0, "pack": 0.25}
ALL = {**BEFORE, "train": 5.0, "sync": 0.5}
STEPS = [
    {"loss": 0.25, "grad_norm": 1.0, "lr": 1e-3, "skipped": False, "weights_digest": "a"},
    {"loss": math.nan, "grad_norm": math.nan, "lr": 3e-3, "skipped": True},
    {"loss": 0.75, "grad_norm": 3.0, "lr": 2e-3, "skipped": False},
]


BATCH = {
    **{"raw_reward": 0.5, "rollout/response_tokens": 640, "rollout/trained_tokens": 600},
    "rollout/response_len/max": 90,
}


MEASURED = {"rollout/spec_accept_rate": 0.75, "perf/non_generation_time/max": 2.0}


LEDGER_BY = {"seconds": BEFORE, "wall_s": 4.75, "train_seconds": {"log_probs": 1.0}}


def project(**changes):
    arguments = {
        "key": "iterations/000003",
        "iteration": 3,
        "time_s": 100.0,
        "batch": {"metrics": BATCH},
        "batch_by": {
            "measured": {"rollout/spec_accept_rate": 0.75, "perf/non_generation_time/max": 2}
        },
        "ledger": ({"result": {"steps": STEPS}}, LEDGER_BY),
        "sync": ({"version": "a-4"}, {"seconds": ALL, "canary": 2e-6, "engines": 2}),
        "rollout_gpus": 2,
    }
    return iteration_record(**{**arguments, **changes})


def test_an_iteration_without_a_trainer_has_what_its_batch_says():
    by = {"seconds": {"generate": 2.0, "pack": 0.5}, "measured": MEASURED}
    metrics = project(ledger=None, sync=None, batch_by=by).metrics
    assert metrics["rollout/raw_reward"] == 0.5 and metrics["rollout/spec_accept_rate"] == 0.75
    assert (metrics["perf/rollout_time"], metrics["perf/step_time"]) == (2.0, 2.5)
    assert metrics["perf/tokens_per_gpu_per_sec"] == 640 / 2.0 / 2
    assert not [name for name in metrics if name.startswith(("train/", "sync/"))]


def test_steps_are_averaged_without_the_skipped_ones():
    metrics = project().metrics
    assert metrics["train/loss"] == 0.5
    assert metrics["train/grad_norm"] == 2.0
    assert metrics["train/lr"] == 2e-3
    assert (metrics["train/steps"], metrics["train/skipped_steps"]) == (3, 1)
    assert "train/weights_digest" not in metrics


def test_an_iteration_whose_steps_were_all_skipped_still_says_so():
    steps = [{"loss": math.nan, "lr": 1e-3, "skipped": True}]
    metrics = project(ledger=({"result": {"steps": steps}}, LEDGER_BY)).metrics
    assert metrics["train/skipped_steps"] == 1
    assert "train/loss" not in metrics


def test_what_was_measured_beside_the_batch_is_reported():
    metrics = project().metrics
    assert metrics["rollout/spec_accept_rate"] == 0.75
    assert metrics["perf/non_generation_time/max"] == 2.0
    assert "rollout/spec_accept_rate" not in project(batch_by={"epoch": 1}).metrics


def test_seconds_become_timings_and_throughput():
    metrics = project().metrics
    assert metrics["perf/rollout_time"] == 4.0
    assert metrics["perf/update_weights_time"] == 0.5
    assert metrics["perf/step_time"] == 10.0
    assert metrics["perf/wait_time_ratio"] == 0.5
    assert metrics["perf/log_probs_time"] == 1.0
    assert metrics["sync/canary_abs_diff"] == 2e-6
    assert metrics["perf/tokens_per_gpu_per_sec"] == 640 / 4.0 / 2
    assert metrics["perf/effective_tokens_per_gpu_per_sec"] == 600 / 4.0 / 2
    assert metrics["perf/longest_sample_tokens_per_sec"] == 90 / 4.0


def test_without_a_sync_document_there_is_no_new_weight_version():
    metrics = project(sync=None).metrics
    assert "progress/weight_version" not in metrics
    assert metrics["perf/step_time"] == 4.5 + 4.75


def test_an_evaluation_is_dated_by_the_weights_it_measured():
    body = {"dataset": "sort", "version": "lineage-7", "iteration": 6}
    record = evaluation_record("evals/lineage-7/sort", 1.0, {**body, "metrics": {"reward": 0.5}})
    assert record.step == 7
    assert record.metrics == {"eval/sort": 0.5, "eval/sort/reward": 0.5}


def test_every_projected_name_is_explained():
    evaluation = {"dataset": "sort", "version": "a-1", "metrics": {"reward": 1.0, "len/mean": 2.0}}
    names = {*project().metrics, *evaluation_record("evals/a-1/sort", 0, evaluation).metrics}
    assert not [name for name in names if find(name) is None]
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_unexplained_names_are_not_found():
    assert find("somewhere/else") is None


@given(st.dictionaries(st.text(min_size=1), st.floats(allow_nan=False)))
def test_records_survive_json(metrics):
    record = Record("iterations/000001", 1, 2.5, metrics)
    assert Record.from_json(record.to_json()) == record


def test_nan_survives_json():
    record = Record.from_json(Record("k", 0, 0.0, {"x": math.nan}).to_json())
    assert math.isnan(record.metrics["x"])


@settings(deadline=None)
@given(st.text())
def test_sanitised_names_are_what_mlflow_takes(name):
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(sanitised(name))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a//b", "a/b"), ("/a", "a"), ("x@1:y", "x_1_y"), ("a/../b", "a/b"), ("é", "_")],
)
def test_sanitised_by_example(name, expected):
    assert sanitised(name) == expected


def test_a_missed_evaluation_is_counted_and_says_nothing_else():
    body = {"dataset": "held", "version": "l0-3", "metrics": {}, "missed": "no grader answered"}
    record = evaluation_record("evals/l0-3/held", 1.0, body)
    assert record.step == 3 and record.metrics == {"eval/held/missed": 1.0}


def test_numbers_of_an_evaluation_have_a_meaning_of_their_own():
    names = ("reward", "pass@{k}", "response_len/{statistic}", "truncated_ratio", "samples")
    for name in names:
        asked = f"eval/greedy/{name}".replace("{k}", "4").replace("{statistic}", "mean")
        metric = find(asked)
        assert metric is not None and metric.name == f"eval/{{dataset}}/{name}"
    metric = find("eval/greedy")
    assert metric is not None and metric.name == "eval/{dataset}"


def test_every_name_of_the_registry_finds_its_own_entry():
    for entry in METRICS:
        asked = re.sub(r"\{\w+\}", "x", entry.name)
        found = find(asked)
        assert found is not None and found.name == entry.name, asked
