"""A Ray cluster."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import Field

from slime_core.errors import ConfigError

LOCAL = "local"


class RayCluster(Block):
    """Where trainer and rollout workers run. So far each run starts a Ray of its own."""

    _block_type_name = "slime RayCluster"
    _block_type_slug = "slime-ray-cluster"

    address: str = Field(
        default=LOCAL, description="local: each run starts its own. Clusters are not supported yet."
    )

    def check(self) -> str:
        """Says what a run would do.

        Raises:
            ConfigError: the address is that of a cluster.
        """
        if self.address != LOCAL:
            raise ConfigError(
                f"Ray at {self.address}: runs on a cluster that stands already are not supported "
                f"yet; use {LOCAL}"
            )
        return "each run starts a Ray of its own on its machine"
