"""Drivers in processes of their own, and the finding of whatever they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime_core.waits import Deadline, poll

ROOT = Path(__file__).parents[3]
MARK = "SLIME_TEST_MARK"
START_S = 240.0


def marked(mark: str) -> list[psutil.Process]:
    """Every process that a driver with this mark has started, itself included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@dataclass
class Driver:
    """One driver process."""

    process: subprocess.Popen[str]
    mark: str

    def lines(self, seconds: float = START_S) -> list[dict[str, Any]]:
        """Waits for its end; what it printed."""
        out, error = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, error
        return [json.loads(line) for line in out.splitlines()]

    def error(self, seconds: float = START_S) -> str:
        """Waits for its failure; the last line it wrote about it."""
        _, error = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 1, error
        return error.strip().splitlines()[-1]

    def wait_nothing_left(self, seconds: float) -> None:
        """Until no process of it is there; names those that are."""
        deadline = Deadline("every process to end", seconds)
        while left := marked(self.mark):
            deadline.check(", ".join(f"{process.pid} {_title(process)}" for process in left))
            time.sleep(0.05)


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:120]
    return "(ended)"


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Starts a driver in the test's workspace; `hold` is a point where it stops to be killed."""
    drivers: list[Driver] = []

    def start(num_rollout: int, hold: str = "", **overrides: Any) -> Driver:
        mark = uuid.uuid4().hex
        environment = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)}
        if hold:
            environment |= {"SLIME_HOLD_AT": hold, "SLIME_HOLD_DIR": str(tmp_path)}
        module = "tests.integration.session.driver"
        arguments = [str(tmp_path / "w"), str(num_rollout), json.dumps(overrides)]
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        drivers.append(Driver(process, mark))
        return drivers[-1]

    yield start
    for driver in drivers:
        for process in marked(driver.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def held(folder: Path, point: str, driver: Driver) -> int:
    """Waits for a process to be held at a point; returns its pid."""

    def reached() -> int | None:
        assert driver.process.poll() is None, driver.process.communicate()[1]
        mark = folder / point
        return int(mark.read_text()) if mark.exists() else None

    return poll(f"a process at {point}", START_S, reached)
