"""A process is held at exactly the point that is named, and never by accident."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.errors import DeadlineError
from slime_core.run import faults
from slime_core.waits import poll


def test_nothing_is_held_unless_the_environment_says_so(monkeypatch):
    monkeypatch.delenv(faults.HOLD_AT, raising=False)
    for point in faults.POINTS:
        faults.hold(point, 0)
        assert not faults.armed(point, 0)


def test_only_the_named_point_of_the_named_iteration_is_armed(monkeypatch):
    monkeypatch.setenv(faults.HOLD_AT, "train@3")
    assert faults.armed("train", 3)
    assert not faults.armed("train", 2) and not faults.armed("train-middle", 3)
    faults.hold("sync", 3)


def test_a_held_process_says_who_it_is_and_stays_until_it_is_killed(tmp_path: Path):
    code = "from slime_core.run.faults import hold; hold('pack', 2); print('went on')"
    environment = {**os.environ, faults.HOLD_AT: "pack@2", faults.HOLD_DIR: str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE
    ) as child:
        mark = tmp_path / "pack@2"
        poll("the held process", 30.0, lambda: True if mark.exists() else None)
        assert int(mark.read_text()) == child.pid
        assert child.poll() is None
        child.kill()
        assert child.stdout is not None and child.stdout.read() == b""


def test_a_released_process_goes_on(tmp_path: Path):
    code = "from slime_core.run.faults import hold; hold('pack', 2); print('went on')"
    environment = {**os.environ, faults.HOLD_AT: "pack@2", faults.HOLD_DIR: str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE
    ) as child:
        mark = tmp_path / "pack@2"
        poll("the held process", 30.0, lambda: True if mark.exists() else None)
        mark.unlink()
        assert child.communicate(timeout=30)[0] == b"went on\n"


def test_nobody_is_held_for_ever(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(faults.HOLD_AT, "pack@2")
    monkeypatch.setenv(faults.HOLD_DIR, str(tmp_path))
    monkeypatch.setattr(faults, "HOLD_LIMIT_S", 0.05)
    with pytest.raises(DeadlineError, match="to kill or release this process, held at pack@2"):
        faults.hold("pack", 2)


def test_several_points_can_be_armed(monkeypatch):
    monkeypatch.setenv(faults.HOLD_AT, "train@3,generate-middle@4")
    assert faults.armed("train", 3) and faults.armed("generate-middle", 4)
    assert not faults.armed("train", 4) and not faults.armed("generate", 4)
