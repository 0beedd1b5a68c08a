"""Which Ray a run uses, and what a person reads where it cannot be used."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace

import pytest

from slime_core.check import cluster as cluster_check
from slime_core.check.findings import Findings
from slime_core.cluster import reach
from slime_core.cluster.address import checked_address, cluster_address
from slime_core.cluster.device import resolve_device
from slime_core.cluster.reach import ClusterFacts, cluster_facts
from slime_core.errors import ConfigError
from tests.integration.session.driver import config_of


def test_the_field_goes_before_the_variable_and_local_before_both(monkeypatch):
    assert cluster_address(config_of("w", 1)) is None
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert cluster_address(config_of("w", 1)) == "head:6379"
    assert cluster_address(config_of("w", 1, ray_address="other:1")) == "other:1"
    assert cluster_address(config_of("w", 1, ray_address="local")) is None
    assert cluster_address(config_of("w", 1, ray_address="auto")) == "auto"
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert cluster_address(config_of("w", 1)) is None


@pytest.mark.parametrize("given", ["ray://head:10001", "http://head:8265"])
def test_from_outside_of_a_cluster_a_job_is_submitted(given):
    with pytest.raises(ConfigError, match=r"on a node of its cluster.* ray job submit"):
        checked_address(given, "ray_address")


@pytest.mark.parametrize("given", ["head", "head:", "head:six", ":6379", "a b:1", "head:6379/x"])
def test_what_is_no_address_is_refused_under_its_name(given):
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS {given}: give HOST:PORT"):
        checked_address(given, "RAY_ADDRESS")


def test_a_closed_port_is_one_sentence_at_once():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, but nobody listens
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ConfigError) as error:
            cluster_facts(address)
    text = str(error.value)
    assert text.startswith(f"the Ray cluster {address} cannot be reached: Connection refused; ")
    assert "\n" not in text and "--ray-address local" in text


def facts_with(monkeypatch, ray: str, python: str, here: bool) -> ClusterFacts:
    """What is said of a cluster of these versions that has one dead and one living node."""
    node = {"state": 0, "node_id": b"\x01", "resources_total": {"GPU": 8.0}}
    dead = {**node, "state": 1, "node_id": b"\x02"}
    nodes = {i: SimpleNamespace(**entry) for i, entry in enumerate((node, dead))}
    stored = json.dumps({"ray_version": ray, "python_version": python})
    monkeypatch.setattr(reach, "connect", lambda address, found: None)
    monkeypatch.setattr(reach, "_ask", lambda address, found: (json.loads(stored), nodes))
    found = ["01"] if here else ["03"]
    monkeypatch.setattr("ray._private.services.find_node_ids", lambda: found)
    return cluster_facts("192.0.2.9:6379")


def test_other_versions_and_other_machines_are_told(monkeypatch):
    import platform

    import ray

    own = platform.python_version()
    with pytest.raises(ConfigError, match=rf"has Ray 1\.0 on Python {own}, this command Ray"):
        facts_with(monkeypatch, "1.0", own, here=True)
    with pytest.raises(ConfigError, match=r"has Ray \S+ on Python 3\.5\.1, this command"):
        facts_with(monkeypatch, ray.__version__, "3.5.1", here=True)
    with pytest.raises(ConfigError, match="this machine is no node of the Ray cluster"):
        facts_with(monkeypatch, ray.__version__, own, here=False)
    found = facts_with(monkeypatch, ray.__version__, own, here=True)
    assert (found.nodes, found.gpus, found.gpus_of_a_node) == (1, 8, 8)


def test_the_device_is_that_of_the_cluster():
    assert resolve_device(config_of("w", 1), cluster_gpus=0) == "cpu"
    assert resolve_device(config_of("w", 1), cluster_gpus=8) == "cuda"
    assert resolve_device(config_of("w", 1, device="cpu"), cluster_gpus=8) == "cpu"
    with pytest.raises(ConfigError, match="a node of the Ray cluster shows no NVIDIA"):
        resolve_device(config_of("w", 1, device="cuda"), cluster_gpus=0)


def test_a_check_tells_once_what_is_out_of_reach(monkeypatch):
    findings = Findings()
    config = config_of("w", 1, ray_address="127.0.0.1:1")
    assert cluster_check.check_cluster(config, findings) is None
    assert len(findings.problems) == 1 and "127.0.0.1:1 cannot be reached" in findings.problems[0]
    findings = Findings()
    assert (
        cluster_check.check_cluster(config_of("w", 1, ray_address="block:gpus"), findings) is None
    )
    assert findings.problems == [], "a block is Prefect's; its own check() looks"


def test_a_store_inside_of_a_jobs_folder_is_refused(tmp_path):
    unpacked = tmp_path / "working_dir_files" / "_ray_pkg_12ab"
    findings = Findings()
    cluster_check.check_cluster(config_of(str(unpacked / "runs"), 1), findings)
    assert "deletes after it: give --workspace" in findings.problems[0]
    findings = Findings()
    elsewhere = config_of(str(unpacked / "runs"), 1, store_url="s3://bucket/runs")
    cluster_check.check_cluster(elsewhere, findings)
    assert findings.problems == []
