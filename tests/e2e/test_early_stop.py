"""A signal while the run is still starting: whoever waits for something then must not matter."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid

import psutil
import pytest

from slime_core.waits import poll
from tests.e2e.runs import ROOT, RunFolder, command

pytestmark = pytest.mark.e2e
MARK = "SLIME_TEST_MARK"
INT, TERM = (signal.SIGINT, 130), (signal.SIGTERM, 143)
MOMENTS = ["starting run", "starting Prefect", "Ray up", "trainer up", "Prefect up"]


def marked(mark: str) -> list[psutil.Process]:
    """Every process that was started with the mark in its environment, also detached ones."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def rare(moment: str, how: tuple[int, int]) -> object:
    """One of all runs with the quick tests: while Ray starts, whose own handler would exit 15."""
    quick = (moment, how) == ("starting Prefect", TERM)
    return pytest.param(moment, how, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("moment", "how"), [rare(moment, how) for moment in MOMENTS for how in (INT, TERM)]
)
def test_a_signal_during_the_start_ends_everything_in_words(tmp_path, moment, how):
    number, status = how
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command(RunFolder(tmp_path), "--num-rollout", "50"),
        cwd=ROOT, env={**os.environ, MARK: mark}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if moment in line:
            break
    process.send_signal(number)
    output, _ = process.communicate(timeout=180)
    output = seen + output
    assert process.returncode == status, output
    assert "the same command goes on" in output
    for page in ("Traceback", "Abort", "SIGTERM received", "actor"):
        assert page not in output
    poll("every process to end", 10, lambda: True if not marked(mark) else None)
    assert not (tmp_path / "store" / "chain" / "iterations").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [INT, TERM])
def test_a_signal_while_the_command_loads_ends_it(tmp_path, how):
    number, status = how
    process = subprocess.Popen(
        [sys.executable, "-c", LOADING, str(tmp_path)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(number)
    output, errors = process.communicate(timeout=180)
    assert (process.returncode, errors) == (status, "")
    assert "the same command goes on" in output


LOADING = """
import importlib.abc, sys, time
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "flows.cli.start":
            print("loading", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
from flows.cli.main import main
sys.exit(main(["train", "configs/quickstart.yaml", "--workspace", sys.argv[1]]))
"""
