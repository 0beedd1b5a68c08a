import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slime_core.run.process import own_identity
from slime_core.waits import poll

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def identity_of(process: subprocess.Popen):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return replace(own_identity(), pid=process.pid, start_ticks=int(fields[19]))


def test_this_process_is_alive():
    me = own_identity()
    assert me.pid == os.getpid() and me.is_gone() is False
    assert me.describe() == f"process {os.getpid()} on {me.host}"


def test_a_pid_that_is_used_again_is_another_process():
    assert replace(own_identity(), start_ticks=own_identity().start_ticks - 1).is_gone() is True


def test_other_machines_and_namespaces_cannot_be_told():
    assert replace(own_identity(), boot_id="other").is_gone() is None
    assert replace(own_identity(), pid_namespace="pid:[1]").is_gone() is None


def test_a_killed_process_is_gone_even_before_it_is_reaped():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identity_of(process)
    assert identity.is_gone() is False
    process.kill()
    poll("the killed process to be a zombie", 10, lambda: identity.is_gone() or None, 0.01)
    process.wait(10)
    assert identity.is_gone() is True
