"""A run waits for a store that is away, says so, and goes on or ends with a sentence."""

import asyncio
import errno
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from slime_core.errors import AccessError, DigestError, FullError, UnavailableError
from slime_core.run import pause as pause_module
from slime_core.run.pause import FILE, ROOM_BYTES, Patience, Pause, paused_runs
from slime_core.run.process import own_identity


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pause_module, "FIRST_WAIT_S", 0.01)


class Watcher:
    """A run in a workspace: what it was told, and what its folder said meanwhile."""

    def __init__(self, workspace, longest_s: float = 60.0) -> None:
        self.workspace = workspace
        self.local = workspace / "local" / "r"
        self.local.mkdir(parents=True)
        self.told: list[Pause | None] = []
        self.noted: list[list[Pause]] = []
        self.calls = 0
        self.patience = Patience("r", str(workspace / "store"), self.local, longest_s, self.tell)

    async def tell(self, pause: Pause | None) -> None:
        self.told.append(pause)
        assert paused_runs(self.workspace) == ([] if pause is None else [pause])

    def bear(self, *errors: Exception):
        """Work that fails with these errors, then is done."""
        left = list(errors)

        async def work() -> str:
            self.calls += 1
            self.noted.append(paused_runs(self.workspace))
            if left:
                raise left.pop(0)
            return "done"

        return asyncio.run(self.patience.bear("pack 000003", work))


def test_work_is_done_again_when_the_store_can_be_used(tmp_path, monkeypatch):
    run = Watcher(tmp_path)
    probes: list[list[Pause]] = []

    def probe(_: Patience) -> None:
        probes.append(paused_runs(tmp_path))
        if len(probes) < 3:
            raise UnavailableError("s3://b/r: SlowDown")

    monkeypatch.setattr(Patience, "_probe", probe)
    assert run.bear(AccessError("the credentials have expired: renew them")) == "done"
    assert run.calls == 2 and len(probes) == 3
    [pause], [again], _ = probes
    assert pause == again and pause.doing == "pack 000003" and pause.run_id == "r"
    assert pause.until_s - pause.since_s == 60.0 and pause.owner == own_identity()
    assert "paused at pack 000003: the credentials have expired: renew them" in pause.describe()
    assert run.told == [pause, None]
    assert run.noted == [[], []]  # never while it works


def test_the_real_probe_leaves_nothing_behind(tmp_path):
    run = Watcher(tmp_path)
    assert run.bear(FullError("no space left"), FullError("no space left")) == "done"
    assert run.calls == 3 and [p is None for p in run.told] == [False, True] * 2
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def full_disk(monkeypatch, name: str, times: int) -> list[Path]:
    """The next writes of files whose name begins so find no space; returns what was tried."""
    tried: list[Path] = []
    whole = Path.write_bytes

    def write_bytes(path: Path, data: bytes) -> int:
        if path.name.startswith(name):
            tried.append(path)
            if len(tried) <= times:
                whole(path, data[:100])
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return whole(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    return tried


def test_the_disk_of_the_workspace_is_probed_too(tmp_path, monkeypatch):
    run = Watcher(tmp_path)
    tried = full_disk(monkeypatch, "probe-", 2)
    assert run.bear(FullError("no space left to write the cache")) == "done"
    assert [path.parent for path in tried] == [run.local] * 3 and run.calls == 2
    assert [pause is None for pause in run.told] == [False, True]
    assert [path.name for path in run.local.iterdir()] == [FILE]


def test_a_disk_that_is_full_at_the_start_costs_only_the_note(tmp_path, monkeypatch, caplog):
    full_disk(monkeypatch, FILE, 1)
    run = Watcher(tmp_path)
    assert "will not tell of a pause" in caplog.text and paused_runs(tmp_path) == []
    assert run.bear(FullError("no space left")) == "done"


def test_a_store_that_stays_away_ends_the_run(tmp_path, monkeypatch):
    def probe(_: Patience) -> None:
        raise UnavailableError("SlowDown")

    monkeypatch.setattr(Patience, "_probe", probe)
    run = Watcher(tmp_path, longest_s=0.2)
    with pytest.raises(UnavailableError, match=r"no space left; .*--store-pause-s 0.2.* goes on"):
        run.bear(FullError("no space left"))
    assert run.calls == 1 and paused_runs(tmp_path) == []
    assert len(run.told) == 1, "nobody was told that it goes on"


def test_without_patience_the_first_error_ends_it(tmp_path):
    run = Watcher(tmp_path, longest_s=0)
    with pytest.raises(UnavailableError, match="no space left; the same command goes on"):
        run.bear(FullError("no space left"))
    assert run.calls == 1 and run.told == []


def test_a_store_that_comes_and_goes_does_so_for_the_longest_pause_only(tmp_path):
    run = Watcher(tmp_path, longest_s=0.3)
    with pytest.raises(UnavailableError, match="longest pause"):
        run.bear(*[FullError("no space left")] * 1000)
    assert run.calls < 15, "each pause is longer than the one before"


def test_other_errors_are_not_waited_for(tmp_path):
    run = Watcher(tmp_path)
    with pytest.raises(DigestError):
        run.bear(DigestError("damaged"))
    assert run.calls == 1 and run.told == []


@pytest.mark.parametrize("letter", ["é", "😀", "\udce9"], ids=["latin", "emoji", "not UTF-8"])
def test_the_note_needs_no_space_when_it_is_written(tmp_path, letter):
    run = Watcher(tmp_path)
    note = run.local / FILE
    before = note.stat()
    seen = []

    async def tell(pause: Pause | None) -> None:
        seen.append(note.stat())
        assert len(paused_runs(tmp_path)) == (pause is not None)

    run.patience._tell = tell
    run.bear(FullError(letter * 10_000))
    assert {(s.st_ino, s.st_size) for s in seen} == {(before.st_ino, ROOM_BYTES)}


def test_notes_of_dead_processes_and_torn_ones_are_no_pauses(tmp_path):
    run = Watcher(tmp_path)
    pause = Pause("r", own_identity(), "pack 000003", "gone", 1.0, 2.0)
    (run.local / FILE).write_text(json.dumps(asdict(pause)).ljust(ROOM_BYTES))
    assert paused_runs(tmp_path) == [pause]
    dead = replace(pause, owner=replace(pause.owner, start_ticks=1))
    (run.local / FILE).write_text(json.dumps(asdict(dead)))
    assert paused_runs(tmp_path) == []
    (run.local / FILE).write_text(json.dumps(asdict(pause))[:50])
    assert paused_runs(tmp_path) == []
