"""Starting, holding, killing and reading whole runs of `slime train` in tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
RUN_TIMEOUT_S = 400.0
DEATH_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RunFolder:
    """One run in a workspace of its own."""

    workspace: Path
    run_id: str = "chain"

    @property
    def store(self) -> Path:
        return self.workspace / "store" / self.run_id

    def document(self, key: str) -> dict[str, Any]:
        return json.loads((self.store / key).read_text())

    def bodies(self, pattern: str) -> dict[str, Any]:
        """The bodies of all documents that match, by key."""
        return {
            path.relative_to(self.store).as_posix(): json.loads(path.read_text())["body"]
            for path in sorted(self.store.glob(pattern))
        }

    def logs(self) -> str:
        """The end of every log file, for a failing test to show."""
        folder = self.workspace / "local" / self.run_id / "logs"
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(folder.glob("*.log"))
        )


def command(run: RunFolder, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "flows.cli.main", "train", str(QUICKSTART)),
        *("--workspace", str(run.workspace), "--run-id", run.run_id, *flags),
    ]


def start(run: RunFolder, *flags: str, hold_at: str | None = None) -> subprocess.Popen[str]:
    """Starts `slime train`; with `hold_at` some process of it will stop and wait to be killed."""
    run.workspace.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "SLIME_HOLD_DIR": str(run.workspace)}
    if hold_at is not None:
        environment["SLIME_HOLD_AT"] = hold_at
    return subprocess.Popen(
        command(run, *flags),
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], run: RunFolder) -> str:
    """Waits for the end; the run must succeed. Returns what it printed."""
    output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 0, f"{output}\n{run.logs()}"
    return output


def kill_when_held(process: subprocess.Popen[str], run: RunFolder, hold_at: str) -> None:
    """SIGKILLs the command once a process of it is held; everything it started must end, too."""
    marker = run.workspace / hold_at
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not marker.exists():
        if process.poll() is not None:
            raise AssertionError(f"ended before {hold_at}: {process.stdout.read()}\n{run.logs()}")  # type: ignore[union-attr]
        assert time.monotonic() < deadline, f"{hold_at} was never reached\n{run.logs()}"
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=DEATH_TIMEOUT_S)
    _, alive = psutil.wait_procs(children, timeout=DEATH_TIMEOUT_S)
    assert not alive, f"outlived the run: {[' '.join(p.cmdline()[:4]) for p in alive]}"
    marker.unlink()
