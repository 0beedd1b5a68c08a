"""What counts as another number."""

import math

import pytest

from slime_core.run.departures import Tolerance, compare_steps, first_departure

STEP = {
    "loss": 1.0, "grad_norm": 2.0, "lr": 1e-3, "entropy_loss": 0.5, "rollout/entropy": 0.5,
    "train_rollout_logprob_abs_diff_max": 4e-6, "tokens": 10, "micro_batches": 3, "skipped": False,
    "weights_digest": "actor:00", "non_finite_rows": [],
}  # fmt: skip
FLOAT32 = Tolerance.of("float32")


def test_numbers_come_in_the_order_they_are_computed_in():
    rows = compare_steps([STEP, STEP], [STEP, STEP], FLOAT32)
    assert [row.metric for row in rows[: len(rows) // 2]] == [
        "rollout/entropy", "entropy_loss", "skipped", "tokens",
        "train_rollout_logprob_abs_diff_max", "loss", "grad_norm", "lr",
    ]  # fmt: skip
    assert first_departure(rows) is None
    assert {row.step for row in rows} == {0, 1}


@pytest.mark.parametrize(
    ("metric", "now", "departs"),
    [
        ("grad_norm", 2.0 + 2.2e-5, False),
        ("grad_norm", 2.0 + 2.4e-5, True),
        ("tokens", 11, True),
        ("train_rollout_logprob_abs_diff_max", 1.3e-5, False),
        ("train_rollout_logprob_abs_diff_max", 1.5e-5, True),
        ("loss", math.nan, True),
        ("skipped", True, True),
        ("micro_batches", 6, False),
    ],
)
def test_what_departs(metric, now, departs):
    found = first_departure(compare_steps([STEP], [STEP | {metric: now}], FLOAT32))
    assert (found is not None) == departs
    assert found is None or found.metric == metric


def test_the_first_of_several_is_named_by_step_then_by_cause():
    later = STEP | {"rollout/entropy": 0.6}
    first = STEP | {"loss": 1.1, "grad_norm": 2.5}
    found = first_departure(compare_steps([STEP, STEP], [first, later], FLOAT32))
    assert found is not None and (found.step, found.metric) == (0, "loss")


def test_a_missing_metric_or_step_departs_and_a_new_one_does_not():
    short = {name: value for name, value in STEP.items() if name != "lr"}
    found = first_departure(compare_steps([STEP], [short], FLOAT32))
    assert found is not None and found.metric == "lr" and found.now is None
    assert first_departure(compare_steps([STEP, STEP], [STEP], FLOAT32)) is not None
    assert first_departure(compare_steps([STEP], [STEP | {"new": 1.0}], FLOAT32)) is None


def test_nan_is_equal_to_nan():
    step = STEP | {"loss": math.nan}
    assert first_departure(compare_steps([step], [step], FLOAT32)) is None


def test_another_tolerance_keeps_the_proportions():
    wide = Tolerance.of("float32", 1e-3)
    assert (wide.absolute, wide.largest) == pytest.approx((3e-4, 1e-3))
