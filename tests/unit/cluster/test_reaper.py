"""What a killed run leaves behind is ended, and nothing else is."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slime_core.cluster import reaper
from slime_core.waits import poll

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "marked").mkdir()
    return str(tmp_path / "marked")


def test_only_what_is_started_inside_of_the_block_is_marked(folder):
    with reaper.marking(folder), subprocess.Popen(SLEEP) as inside:
        assert os.environ[reaper.MARK] == folder
        poll("the mark", 5, lambda: inside.pid in reaper.marked(folder) or None)
        inside.kill()
    assert reaper.MARK not in os.environ
    with subprocess.Popen(SLEEP) as outside:
        assert outside.pid not in reaper.marked(folder)
        outside.kill()


def test_a_process_that_holds_a_file_below_the_folder_belongs_to_it(folder):
    code = f"f = open({folder + '/log'!r}, 'w'); print(flush=True); import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        assert holder.pid in reaper.marked(folder)
        holder.kill()
    assert holder.pid not in reaper.marked(folder)


def test_a_sweep_waits_first_and_kills_then(folder):
    with reaper.marking(folder):
        child = subprocess.Popen(SLEEP)
    started_s = time.monotonic()
    try:
        # Nobody reaps the child meanwhile, and a zombie shows no mark any more.
        assert reaper.sweep(folder, grace_s=0.3)
        assert time.monotonic() - started_s >= 0.3
        assert child.wait(5) == -signal.SIGKILL
    finally:
        child.kill()


def test_a_sweep_with_nothing_to_do_returns_at_once(folder):
    assert reaper.sweep(folder, grace_s=60)


PARENT = """
import subprocess, sys, time
from slime_core.cluster import reaper
folder = sys.argv[1]
watcher = reaper.start(folder)
with reaper.marking(folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, watcher.pid, flush=True)
time.sleep(600)
"""


def test_after_a_kill_the_marked_end_and_the_folder_goes(folder):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, folder], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child, watcher = map(int, parent.stdout.readline().split())
        assert psutil.pid_exists(child) and psutil.pid_exists(watcher)
        parent.kill()
    for pid in (child, watcher):
        poll(f"process {pid} to end", 15, lambda pid=pid: None if psutil.pid_exists(pid) else True)
    assert not Path(folder).exists()
