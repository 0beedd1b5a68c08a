"""`slime stop` while the store is away: the note of the pause tells which process to stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flows.cli import stop
from flows.cli.main import main
from slime_core.errors import UnavailableError
from slime_core.run.pause import Pause
from slime_core.run.process import ProcessIdentity, identity_of, own_identity


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One that a signal ends."""
    one = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield one
    one.kill()
    one.wait(60)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One whose store is away."""

    def away(*_: object, **__: object) -> None:
        raise UnavailableError("s3://b/r: SlowDown")

    monkeypatch.setattr(stop, "open_run", away)
    return tmp_path


def note(workspace: Path, run_id: str, owner: ProcessIdentity) -> None:
    local = workspace / "local" / run_id
    local.mkdir(parents=True)
    pause = Pause(run_id, owner, "pack 000002", "SlowDown", 1.0, 2.0)
    (local / "paused.json").write_text(json.dumps(asdict(pause)))


@pytest.mark.parametrize("wanted", ["sorting", "sort", "last"])
def test_a_paused_run_is_stopped_by_its_note(workspace, process, wanted, capsys):
    note(workspace, "sorting", identity_of(process.pid))
    assert main(["stop", wanted, "--workspace", str(workspace), "--timeout-s", "60"]) == 0
    assert process.wait(60) == -15
    assert capsys.readouterr().out == (
        f"run sorting stopped; `slime resume sorting --workspace {workspace}` goes on once the "
        "store can be used\n"
    )


def test_what_no_note_tells_of_is_not_stopped(workspace, process, capsys):
    asked = ["stop", "sorting", "--workspace", str(workspace)]
    assert main(asked) != 0
    assert "SlowDown" in capsys.readouterr().err
    for run_id in ("math-a", "math-b"):
        note(workspace, run_id, identity_of(process.pid))
    for wanted, why in (("sorting", "none fits"), ("math", "several fit")):
        assert main(["stop", wanted, *asked[2:]]) != 0
        assert f"(math-a, math-b) {why}: s3://b/r: SlowDown" in capsys.readouterr().err
    assert main(["stop", "math-a", "--after-iteration", *asked[2:]]) != 0
    assert "leave --after-iteration out" in capsys.readouterr().err
    assert process.poll() is None


def test_a_run_of_another_machine_is_left_alone(workspace, capsys):
    note(workspace, "sorting", replace(own_identity(), boot_id="other", host="elsewhere"))
    assert main(["stop", "sorting", "--workspace", str(workspace)]) != 0
    assert f"process {os.getpid()} on elsewhere: type `slime stop` on" in capsys.readouterr().err
