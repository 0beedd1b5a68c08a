"""A sample of the kill matrix: every boundary and every victim once or more, in two runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kill_matrix.cases import BOUNDARIES, VICTIMS, Case, Kill
from benchmarks.kill_matrix.play import play, play_untouched

CASES = [
    Case(
        "file",
        "file",
        (
            Kill("flow", "sample@1"),
            Kill("engine", "generate@1"),
            Kill("trainer", "train@1"),
            Kill("rollout", "evaluate@2"),
            Kill("everything", "pack@4"),
        ),
    ),
    Case(
        "s3",
        "s3",
        (
            Kill("trainer", "sync@0"),
            Kill("head", "reward@2"),
            Kill("flow", "train-middle@3"),
            Kill("flow", "generate-middle@4"),
        ),
    ),
]


def test_the_sample_has_every_boundary_and_every_victim():
    kills = [kill for case in CASES for kill in case.kills]
    assert {str(kill.hold).split("@")[0] for kill in kills} >= set(BOUNDARIES)
    assert {kill.victim for kill in kills} == set(VICTIMS)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_of_everything_lose_nothing(tmp_path: Path):
    untouched = play_untouched(tmp_path / "untouched")
    for case in CASES:
        played = play(case, tmp_path / case.name, untouched)
        assert played.problems == [], played
        assert [kill["kill"] for kill in played.kills] == [str(kill) for kill in case.kills]
