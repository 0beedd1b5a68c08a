"""What actors on a foreign cluster get of the command's surroundings."""

from __future__ import annotations

import os
from pathlib import Path

from slime_core.cluster.place import Place


def test_everything_travels_but_what_belongs_to_the_machine_or_to_ray(monkeypatch, tmp_path):
    for name in ("JUDGE_KEY", "AWS_SECRET_ACCESS_KEY", "OMP_NUM_THREADS", "SLIME_HOLD_AT"):
        monkeypatch.setenv(name, f"value of {name}")
    mine = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")
    for name in (*mine, "PREFECT_API_KEY"):
        monkeypatch.setenv(name, f"other {name}")
    monkeypatch.chdir(tmp_path)
    place = Place.here()
    assert place.variables["JUDGE_KEY"] == "value of JUDGE_KEY"
    assert {"AWS_SECRET_ACCESS_KEY", "OMP_NUM_THREADS", "SLIME_HOLD_AT"} <= place.variables.keys()
    assert not place.variables.keys() & {*mine, "PREFECT_API_KEY"}
    assert place.folder == str(tmp_path)


def test_what_travels_is_never_shown(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    assert "sesame" not in repr(Place.here())


def test_a_process_takes_it_and_stays_where_the_folder_is_not(monkeypatch, tmp_path):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(tmp_path)
    before = Path.cwd()
    Place(str(tmp_path / "nowhere"), {"JUDGE_KEY": "sesame"}).take()
    assert os.environ["JUDGE_KEY"] == "sesame" and Path.cwd() == before
    (tmp_path / "there").mkdir()
    Place(str(tmp_path / "there"), {}).take()
    assert Path.cwd() == tmp_path / "there"
