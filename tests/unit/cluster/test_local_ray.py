from pathlib import Path

import pytest
import ray

from slime_core.cluster.local_ray import LocalRay
from slime_core.errors import EngineError


def test_a_node_that_does_not_come_up_is_told_in_a_sentence(tmp_path, monkeypatch):
    """Ray raises plain Exception, which the command would show as a fault of its own."""

    def init(**_):
        raise Exception("the node timed out")

    monkeypatch.setattr(ray, "init", init)
    local = LocalRay(tmp_path / "ray.txt")
    try:
        with pytest.raises(EngineError, match=r"could not be started.*the node timed out"):
            local.start()
    finally:
        local.stop()
    assert not (tmp_path / "ray.txt").exists()


@pytest.mark.parametrize(
    ("said", "starts"), [("The current node timed out during startup.", 2), ("no such folder", 1)]
)
def test_a_node_that_was_too_slow_is_started_once_more(said, starts, tmp_path, monkeypatch):
    """A busy machine may miss the 30 s that Ray gives its node; another fault would come again."""
    folders = []

    def init(_temp_dir: str, **_):
        folders.append(Path(_temp_dir))
        raise Exception(said)

    monkeypatch.setattr(ray, "init", init)
    local = LocalRay(tmp_path / "ray.txt")
    try:
        with pytest.raises(EngineError, match=said):
            local.start()
    finally:
        local.stop()
    assert len(set(folders)) == starts
    assert not any(folder.exists() for folder in folders)


@pytest.mark.slow
def test_a_second_start_that_succeeds_is_a_start(tmp_path, monkeypatch):
    real, calls = ray.init, []

    def init(**options):
        calls.append(1)
        if len(calls) == 1:
            raise Exception("The current node timed out during startup.")
        return real(**options)

    monkeypatch.setattr(ray, "init", init)
    local = LocalRay(tmp_path / "ray.txt")
    try:
        local.start()
        assert ray.is_initialized()
    finally:
        local.stop()
    assert not ray.is_initialized() and len(calls) == 2
