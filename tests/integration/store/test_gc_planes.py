"""`slime gc --drop-planes` by command, on a run with two checkpoints, here and on S3."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from flows.cli.main import main
from slime_core.run.epoch import Lease
from slime_core.store import layout
from slime_core.store.backend import FileBackend, open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.checkpoints import checkpoint_directory, put_checkpoint
from slime_core.store.compaction import compact_segment
from slime_core.store.documents import put_document
from slime_core.store.ledger import initial_state
from slime_core.store.parts import GroupRows
from tests.s3 import ENVIRONMENT, unique_prefix
from tests.unit.store.builders import FakeOwner, finished_sample, run_iteration

ITERATIONS = 4
ROOT = Path(__file__).parents[3]
COUNTS = (
    "SELECT iteration, count(*) n, count(multimodal_inputs) media, "
    "count(rollout_routed_experts) experts FROM samples GROUP BY 1 ORDER BY 1"
)


def rich(group: int) -> GroupRows:
    """Two rows with routed experts and media."""
    samples = [finished_sample(group, i) for i in range(2)]
    for sample in samples:
        sample.rollout_routed_experts = np.full((len(sample.tokens), 2, 2), group, dtype=np.uint8)
        sample.multimodal_inputs = {"images": [f"image {sample.index}"]}
    return GroupRows(group, 0, 0, group, samples, grader_digest="g")


@dataclass
class Stored:
    """A run, and the command on it."""

    cache: NodeCache
    flags: list[str]
    capsys: pytest.CaptureFixture[str]

    def slime(self, command: str, *arguments: str) -> tuple[int, list[dict], str]:
        """(exit status, rows, what stands on stderr)"""
        status = main([command, "run", *arguments, "--json", *self.flags])
        shown = self.capsys.readouterr()
        rows = shown.out.splitlines() if command != "export" and status == 0 else []
        return status, [json.loads(row) for row in rows], shown.err

    def counts(self) -> list[list[int]]:
        """[rows, media, experts] of each iteration."""
        status, rows, _ = self.slime("query", COUNTS)
        assert status == 0
        return [[row["n"], row["media"], row["experts"]] for row in rows]

    def objects(self) -> list[str]:
        return [entry.key for entry in self.cache.backend.list("groups/")]

    def sound(self) -> bool:
        return self.slime("verify", "--rows")[0] == 0


def store_run(url: str, workspace: Path, checkpoints: tuple[int, ...]) -> NodeCache:
    backend, root = open_backend(f"{url}/run"), open_backend(url)
    body = {"run_id": "run", "format_version": 1, "identity": {}, "identity_digest": "i"}
    for store, key in ((backend, layout.RUN), (root, "runs/run.json")):
        put_document(store, key, body, {"created": "2026-01-01"})
    cache = NodeCache(backend, workspace / "local" / "run" / "cache")
    state, seal = initial_state("weights"), ""
    for k in range(ITERATIONS):
        state, seal = run_iteration(backend, k, state, seal, rich)
        if k in checkpoints:
            folder = checkpoint_directory(cache, k, 0)
            folder.mkdir()
            (folder / "model.bin").write_bytes(b"weights")
            put_checkpoint(
                cache, FakeOwner(), iteration=k, state=state, weight_version=f"a-{k + 1}", about={}
            )
    return cache


@pytest.fixture
def make(tmp_path, capsys):
    """Makes a run in a store, by default of this machine, with two final checkpoints."""

    def stored(url: str | None = None, checkpoints: tuple[int, ...] = (1, 3)) -> Stored:
        url = url or str(tmp_path / "store")
        cache = store_run(url, tmp_path, checkpoints)
        return Stored(cache, ["--workspace", str(tmp_path), "--store-url", url], capsys)

    return stored


@pytest.fixture
def on_s3(s3_url, monkeypatch):
    """The URL of a store on moto's server, whose keys are in the environment."""
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": s3_url}.items():
        monkeypatch.setenv(name, value)
    return unique_prefix("planes")


@pytest.mark.parametrize("place", ["here", pytest.param("s3", marks=pytest.mark.slow)])
def test_planes_go_where_two_checkpoints_hold_what_was_trained(place, make, request, tmp_path):
    run = make(request.getfixturevalue("on_s3") if place == "s3" else None)
    whole, thin = [4, 4, 4], [4, 0, 0]
    assert run.counts() == [whole] * 4, "and the tables of that are kept"
    before = run.objects()
    (told,) = run.slime("gc", "--drop-planes", "experts,media", "--dry-run")[1]
    assert (told["segments_to_thin"], run.objects()) == (2, before)

    status, (told,), err = run.slime("gc", "--drop-planes", "media", "--keep-planes", "3")
    assert (status, told["segments_thinned"], err) == (0, 1, "")
    assert run.counts() == [[4, 0, 4], whole, whole, whole]
    (told,) = run.slime("gc", "--drop-planes", "experts,media", "--dry-run")[1]
    assert told["segments_to_thin"] == 2, "experts of the first, both of the second"
    assert run.slime("gc", "--drop-planes", "experts,media")[1][0]["segments_thinned"] == 2
    assert run.counts() == [thin, thin, whole, whole]
    for asked in (["--dry-run"], []):
        _, (told,), err = run.slime("gc", "--drop-planes", "experts,media", *asked)
        assert (told.get("segments_to_thin", told.get("segments_thinned")), err) == (0, "")
    assert run.sound()

    note = "note: {}media of iterations 0 to 1 were given up (slime gc --drop-planes), so these"
    assert note.format("") in run.slime("query", "SELECT max(MULTIMODAL_INPUTS) m FROM samples")[2]
    assert run.slime("query", "SELECT avg(reward) FROM samples")[2] == ""
    both = note.format("experts of iterations 0 to 1 and ")
    assert both in run.slime("query", "SELECT * FROM samples")[2]
    assert both in run.slime("export", str(tmp_path / "rows.parquet"))[2]
    lost = "SELECT plane, iteration, count(*) groups FROM lost GROUP BY ALL ORDER BY ALL"
    assert [tuple(row.values()) for row in run.slime("query", lost)[1]] == [
        ("experts", 0, 2), ("experts", 1, 2), ("media", 0, 2), ("media", 1, 2)
    ]  # fmt: skip

    grade = ["--rm-type", "exact_match"]
    status, _, err = run.slime("rescore", *grade)
    assert status == 2 and "the media of segments 0 to 1 were given up" in err
    assert not run.cache.backend.list("scores/"), "refused before anything is graded"
    status, rows, _ = run.slime("rescore", *grade, "--segments", "2:4")
    assert [row["segment"] for row in rows] == [2, 3]

    assert run.slime("gc", "--keep-last", "3")[1][0]["segments_dropped"] == 1
    assert run.counts() == [thin, whole, whole]
    err = run.slime("query", "SELECT count(*) FROM samples")[2]
    assert "the rows of segments 0 were given up (slime gc) and are not here" in err


def test_it_says_why_nothing_can_go_and_what_it_was_asked_in_vain(make):
    run = make(checkpoints=(3,))
    before = run.objects()
    for flags in (["--drop-planes", "media"], ["--keep-last", "1"]):
        for dry in ([], ["--dry-run"]):
            status, _, err = run.slime("gc", *flags, *dry)
            assert status == 0 and "two final checkpoints" in err and "--save-interval" in err
    assert run.objects() == before and run.slime("gc")[2] == ""
    for flags in (["--keep-planes", "2"], ["--drop-planes", "media", "--keep-planes", "-1"]):
        assert run.slime("gc", *flags)[0] == 2
    for wrong in ("", "tokens", "media,tokens"):
        status, _, err = run.slime("gc", "--drop-planes", wrong)
        assert status == 2 and "cannot be given up: name experts or media" in err


def test_a_run_that_trains_keeps_all(make):
    run = make()
    before = run.objects()
    with Lease.acquire(run.cache.backend):
        status, _, err = run.slime("gc", "--drop-planes", "media")
    assert status == 1 and "end it first" in err and run.objects() == before


def test_a_fork_that_would_need_rows_that_went_is_refused(make):
    run = make()
    assert run.slime("gc", "--keep-last", "2")[1][0]["segments_dropped"] == 2
    status, _, err = run.slime("fork", "--at", "0", "--run-id", "twig")
    assert status == 2 and "trains iteration 0 again, whose rows were given up (slime gc)" in err
    assert "with a checkpoint (1, 3)" in err
    for at in ("1", "2", "3"):
        status, (made,), _ = run.slime("fork", "--at", at, "--run-id", f"twig{at}")
        assert (status, made["checkpoint"]) == (0, 3 if at == "3" else 1)


KILLED = """
import os, signal, sys
from flows.cli.main import main
from slime_core.store.backend import FileBackend

plain, left = FileBackend.delete, [int(sys.argv[1])]

def delete(self, key):
    left[0] -= key.startswith("groups/")
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(self, key)

FileBackend.delete = delete
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("compacted", [False, True])
def test_one_that_is_killed_in_the_middle_is_finished_by_the_next(make, compacted):
    run = make()
    if compacted:
        compact_segment(run.cache, 0)
    command = ["gc", "run", "--drop-planes", "media", *run.flags]
    killed = [sys.executable, "-c", KILLED, "0" if compacted else "3", *command]
    assert subprocess.run(killed, cwd=ROOT).returncode == -signal.SIGKILL
    assert run.sound() and len(run.objects()) > 8, "files of before and after"
    assert main(command) == 0
    run.capsys.readouterr()
    assert run.counts() == [[4, 0, 4], [4, 0, 4], [4, 4, 4], [4, 4, 4]] and run.sound()
    files = [key for key in run.objects() if key.startswith(("groups/000000", "groups/000001"))]
    assert [bool(layout.parse_compact(key)) for key in files] == [True, False] * 2


@pytest.mark.parametrize("compacted", [False, True])
def test_half_a_file_of_a_machine_that_went_down_is_made_again(make, monkeypatch, compacted):
    """A power cut may leave a compacted file torn beside the files that it was made of."""
    run = make()
    if compacted:
        compact_segment(run.cache, 0)
    there = set(run.objects())
    with monkeypatch.context() as patch:
        patch.setattr(run.cache.backend, "delete", lambda key: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compact_segment(run.cache, 0, ("media",))
    (new,) = set(run.objects()) - there
    data = run.cache.backend.get(new)
    run.cache.backend.delete(new)
    run.cache.backend.put_new(new, data[: len(data) // 2])
    assert run.counts()[0] == [4, 4, 4] and run.slime("verify")[0] == 1
    status, (told,), _ = run.slime("gc", "--drop-planes", "media")
    assert (status, told["segments_thinned"]) == (0, 2) and run.sound()
    assert run.counts()[0] == [4, 0, 4]


def test_what_takes_the_place_of_rows_is_on_the_disk_before_they_go(make, monkeypatch):
    run = make()
    done: list[str] = []
    fsync, delete = os.fsync, FileBackend.delete
    monkeypatch.setattr(os, "fsync", lambda file: done.append(_named(file)) or fsync(file))
    monkeypatch.setattr(
        FileBackend, "delete", lambda self, key: done.append(key) or delete(self, key)
    )
    assert run.slime("gc", "--drop-planes", "media")[0] == 0
    for segment in (0, 1):
        folder = str(run.cache.backend.local_path(layout.segment(segment).rstrip("/")))
        first = next(i for i, name in enumerate(done) if name.startswith(layout.segment(segment)))
        assert folder in done[:first], "the folder that names the new file"


def _named(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())
