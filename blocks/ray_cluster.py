"""A Ray cluster."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import Field

from slime_core.cluster.address import OWN, checked_address
from slime_core.cluster.reach import cluster_facts

LOCAL = OWN


class RayCluster(Block):
    """Where trainer, engines and rollout workers run. A configuration names it as
    `ray_address: block:NAME`."""

    _block_type_name = "slime RayCluster"
    _block_type_slug = "slime-ray-cluster"

    address: str = Field(
        default=LOCAL,
        description="HOST:PORT of a cluster that stands already, auto for the one on the machine "
        "of the run, or local: each run starts its own.",
    )

    def environment(self) -> dict[str, str]:
        """Nothing: it holds no secret."""
        return {}

    def check(self) -> str:
        """Asks the cluster, and says what a run would do.

        Raises:
            ConfigError: it cannot be reached from here, or a run cannot use it.
        """
        address = checked_address(self.address, "address")
        if address is None:
            return "each run starts a Ray of its own on its machine"
        return f"runs join the Ray cluster {cluster_facts(address).describe()}"
