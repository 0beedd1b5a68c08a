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
