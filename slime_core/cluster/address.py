"""Which Ray a run uses: one of its own, or a cluster that stands already. Imports no Ray."""

from __future__ import annotations

import os
import re

from slime_core.config.block_names import PREFIX
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError

OWN = "local"
ANY = "auto"
VARIABLE = "RAY_ADDRESS"
HOST_AND_PORT = re.compile(r"(?P<host>[^\s:/]+|\[[0-9A-Fa-f:]+\]):(?P<port>\d{1,5})")


def cluster_address(config: RunConfig) -> str | None:
    """The address of the cluster that a run is to use; None where it starts a Ray of its own, or
    where a block names the address.

    Raises:
        ConfigError: it is no address that a run can use.
    """
    given = config.cluster.ray_address
    if given is not None and given.startswith(PREFIX):
        return None
    return checked_address(given, "ray_address")


def checked_address(given: str | None, name: str) -> str | None:
    """An address that was given, else the one of RAY_ADDRESS; None means a Ray of one's own.

    Args:
        name: what the address is called where it was given.

    Raises:
        ConfigError: see `cluster_address`.
    """
    if given is None:
        given, name = os.environ.get(VARIABLE) or OWN, VARIABLE
    if given == OWN:
        return None
    if given == ANY or HOST_AND_PORT.fullmatch(given):
        return given
    if given.startswith(("ray://", "http://", "https://")):
        raise ConfigError(
            f"{name} {given}: a run is started on a node of its cluster, with {ANY} or HOST:PORT "
            "(6379 as a rule); from elsewhere: ray job submit --address http://HOST:8265 "
            "--working-dir . -- python3 train.py ..."
        )
    raise ConfigError(
        f"{name} {given}: give HOST:PORT of a Ray cluster, {ANY} for the one on this machine, or "
        f"{OWN} for a Ray of the run's own"
    )
