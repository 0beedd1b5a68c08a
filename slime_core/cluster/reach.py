"""A look at a Ray cluster from outside: does it answer, does it fit, what has it got."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import dataclass
from typing import Any

from slime_core.cluster.address import ANY
from slime_core.errors import ConfigError

CONNECT_S = 3.0
ANSWER_S = 5.0


@dataclass(frozen=True)
class ClusterFacts:
    """What a cluster says of itself.

    Attributes:
        address: HOST:PORT.
        ray, python: its versions, which are those of this process.
        nodes: nodes that are alive.
        gpus: GPUs of all of them.
        gpus_of_a_node: most GPUs of one of them.
    """

    address: str
    ray: str
    python: str
    nodes: int
    gpus: int
    gpus_of_a_node: int

    def describe(self) -> str:
        """One line for a person."""
        gpus = f"{self.gpus} GPUs" if self.gpus else "no GPU"
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.address} (Ray {self.ray}, {nodes}, {gpus})"


def cluster_facts(address: str) -> ClusterFacts:
    """Asks a cluster without joining it.

    Args:
        address: HOST:PORT, or auto for the cluster that was started on this machine last.

    Raises:
        ConfigError: it cannot be reached, has other versions, or this machine is none of its nodes.
    """
    from ray import __version__ as own_ray
    from ray._private import services

    try:
        found = services.canonicalize_bootstrap_address(address)
    except (ConnectionError, OSError, ValueError) as error:
        raise _out_of_reach(address, "no cluster runs on this machine", address == ANY) from error
    if found is None:
        raise _out_of_reach(address, "no cluster runs on this machine", True)
    connect(address, found)
    versions, nodes = _ask(address, found)
    own_python = ".".join(map(str, sys.version_info[:3]))
    theirs = (versions.get("ray_version"), versions.get("python_version"))
    if theirs != (own_ray, own_python):
        raise ConfigError(
            f"the Ray cluster at {found} has Ray {theirs[0]} on Python {theirs[1]}, this command "
            f"Ray {own_ray} on Python {own_python}: start both from the same environment"
        )
    alive = [node for node in nodes.values() if node.state == 0]
    if not {node.node_id.hex() for node in alive} & set(services.find_node_ids()):
        raise ConfigError(
            f"this machine is no node of the Ray cluster at {found}: start the command on one of "
            "its nodes, or submit it (ray job submit --address http://HOST:8265 ...)"
        )
    gpus = [int(dict(node.resources_total).get("GPU", 0)) for node in alive]
    return ClusterFacts(found, own_ray, own_python, len(alive), sum(gpus), max(gpus))


def connect(address: str, found: str) -> None:
    """Finds out whether anybody listens: Ray would wait for half a minute, and tell it in pages.

    Args:
        address: as it was given.
        found: HOST:PORT.

    Raises:
        ConfigError: nobody does.
    """
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _out_of_reach(address, reason, False) from error


def _ask(address: str, found: str) -> tuple[dict[str, Any], dict[Any, Any]]:
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
    from ray.exceptions import RayError

    try:
        client = GcsClient(address=found)
        stored = client.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=ANSWER_S)
        return json.loads(stored or b"{}"), client.get_all_node_info(timeout=ANSWER_S)
    except (RayError, RuntimeError, OSError, ValueError) as error:
        reason = f"it does not answer as a Ray cluster ({str(error).strip().splitlines()[0]})"
        raise _out_of_reach(address, reason, False) from error


def _out_of_reach(address: str, reason: str, start_one: bool) -> ConfigError:
    fix = "start one with `ray start --head`" if start_one else "start it, or give another address"
    return ConfigError(
        f"the Ray cluster {address} cannot be reached: {reason}; {fix} (RAY_ADDRESS or "
        "--ray-address; --ray-address local uses a Ray of the run's own)"
    )
