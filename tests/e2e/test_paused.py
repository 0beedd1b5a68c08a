"""A run whose store is away for a time: it says so, waits, and goes on to a sound end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.run.audit import audit
from slime_core.store.backend import open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.verify import verify_run
from slime_core.waits import poll
from tests.e2e.runs import ROOT, RunFolder, finish, start
from tests.e2e.test_run_on_s3 import ROWS, mirrored
from tests.s3 import BUCKET, ENVIRONMENT, moto_server, troubled

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
FLAGS = ("--no-prefect", "--num-rollout", "5", "--eval-interval", "100", "--skip-eval-before-train")


def status(run: RunFolder, *flags: str) -> list[dict[str, object]]:
    """The runs that `slime status` tells of."""
    command = [sys.executable, "-m", "flows.cli.main", "status", "--json"]
    done = subprocess.run(
        [*command, "--workspace", str(run.workspace), *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stderr
    return [row for row in map(json.loads, done.stdout.splitlines()) if "run" in row]


def until(what: str, process: subprocess.Popen[str], run: RunFolder, ready) -> None:
    def look() -> bool | None:
        assert process.poll() is None, f"{process.stdout.read()}\n{run.logs()}"  # type: ignore[union-attr]
        return ready() or None

    poll(what, 180, look, interval_s=0.2)


def test_a_run_waits_for_new_credentials(tmp_path: Path, monkeypatch) -> None:
    run = RunFolder(tmp_path / "w", "waits")
    with moto_server() as target, troubled(target) as (url, trouble):
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        root = f"s3://{BUCKET}/team"
        process = start(run, *FLAGS, "--store-url", root)
        backend = open_backend(f"{root}/waits")
        until("a ledger", process, run, lambda: backend.list("iterations/000001/ledger"))
        trouble.away = (400, "ExpiredToken")
        note = run.workspace / "local/waits/paused.json"
        until("the pause", process, run, lambda: note.read_text().strip())
        [shown] = status(run, "--store-url", root)
        trouble.away = None
        assert (shown["run"], shown["state"]) == ("waits", "paused")
        assert "the credentials have expired" in str(shown["why"])
        output = finish(process, run)
        assert "paused at " in output and " goes on after a pause of " in output
        assert not note.read_text().strip()
        assert verify_run(NodeCache(backend)) == []
        found = audit(mirrored(backend, tmp_path / "mirror"), dataset_rows=ROWS)
        assert found.sound and (found.iterations, found.open) == (5, 0), found.problems


def has_namespaces() -> bool:
    command = ["unshare", "-rm", "true"]
    return bool(shutil.which("unshare")) and subprocess.run(command, check=False).returncode == 0


@pytest.mark.skipif(not has_namespaces(), reason="no mounts of our own here")
def test_a_run_waits_for_space_on_a_full_disk(tmp_path: Path) -> None:
    command = ["unshare", "-rm", sys.executable, "-m", "tests.e2e.test_paused", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr


def fill_a_disk(folder: Path) -> None:
    """In a mount namespace of its own: the store has a small disk, which somebody fills."""
    disk, run = folder / "disk", RunFolder(folder / "w", "full")
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
    process = start(run, *FLAGS, "--store-url", str(disk), "--save-interval", "1")
    until("a ledger", process, run, lambda: (disk / "full/iterations/000001/ledger.json").exists())
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(bytes(4096)):
                pass
        except OSError as error:
            print(f"filled: {error}")
    note = run.workspace / "local/full/paused.json"
    until("the pause", process, run, lambda: note.read_text().strip())
    [shown] = status(run, "--store-url", str(disk))
    (disk / "filler").unlink()
    assert shown["state"] == "paused" and "no space left" in str(shown["why"]), shown
    output = finish(process, run)
    assert "paused at " in output and " goes on after a pause of " in output, output
    assert verify_run(NodeCache(open_backend(str(disk / "full")))) == []
    found = audit(disk / "full", dataset_rows=ROWS)
    assert found.sound and (found.iterations, found.open) == (5, 0), found.problems
    assert not list((disk / "full/.tmp").iterdir())


if __name__ == "__main__":
    fill_a_disk(Path(sys.argv[1]))
