import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.evaluation.obligations import (
    EvalSchedule,
    Obligation,
    epoch_end_versions,
    owed,
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 4, 8, 10]),
        ({"before_train": False}, [4, 8, 10]),
        ({"at_end": False}, [0, 4, 8]),
        ({"interval": None}, []),
        ({"interval": 5}, [0, 5, 10]),
        ({"interval": 99}, [0, 10]),
        ({"epoch_ends": frozenset({7})}, [0, 4, 7, 8, 10]),
    ],
)
def test_due_versions(options, expected):
    schedule = EvalSchedule(**{"num_rollout": 10, "interval": 4} | options)
    assert schedule.due_versions() == expected


def test_a_run_of_no_iterations_is_an_evaluation_only():
    assert EvalSchedule(num_rollout=0, interval=1).due_versions() == [0]


def test_owed_splits_what_is_served_from_what_was_missed():
    schedule = EvalSchedule(num_rollout=10, interval=4)
    found = owed(schedule, ["a", "b"], served=8, settled={(0, "a"), (4, "a"), (4, "b"), (8, "b")})
    assert found.now == (Obligation(8, "a"),)
    assert found.missed == (Obligation(0, "b"),)


HISTORY = st.sets(st.tuples(st.integers(0, 12), st.sampled_from("ab")))


@given(
    interval=st.integers(1, 5),
    before=st.booleans(),
    deaths=st.lists(st.booleans(), min_size=13, max_size=13),
)
def test_every_evaluation_runs_once_or_is_missed_whatever_dies(interval, before, deaths):
    """Walks through a run; where `deaths` says so, the evaluations of a version are lost."""
    schedule = EvalSchedule(12, interval, before_train=before)
    results: list[tuple[int, str]] = []
    missed: set[tuple[int, str]] = set()
    for version, dies in enumerate(deaths):
        if dies:
            continue
        found = owed(schedule, ["a", "b"], version, {*results, *missed})
        missed |= {(one.version, one.dataset) for one in found.missed}
        results += [(one.version, one.dataset) for one in found.now]
    end = max((v for v, dies in enumerate(deaths) if not dies), default=-1)
    expected = {(version, name) for version in schedule.due_versions(end) for name in "ab"}
    assert len(results) == len(set(results))
    assert not set(results) & missed
    assert {*results, *missed} == (expected if end >= 0 else set())


@given(settled=HISTORY, served=st.integers(0, 12))
def test_settled_evaluations_are_never_owed(settled, served):
    found = owed(EvalSchedule(12, 3), ["a", "b"], served, settled)
    assert not {(one.version, one.dataset) for one in found.now + found.missed} & settled


def test_epoch_ends():
    assert list(epoch_end_versions(6, groups_per_iteration=4, prompts=10)) == [3, 5]
    assert list(epoch_end_versions(2, groups_per_iteration=25, prompts=10)) == [1, 2]
