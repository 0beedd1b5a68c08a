"""`block:NAME` in a configuration: the place goes into the configuration, secrets never do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from blocks.grader_secrets import GraderSecrets
from blocks.ray_cluster import RayCluster
from blocks.sample_store import SampleStore
from blocks.tracking import Tracking
from slime_core.config.block_names import blocks_in
from slime_core.config.loading import load_config
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError

Kind = type[SampleStore] | type[Tracking] | type[GraderSecrets] | type[RayCluster]
KINDS: dict[str, Kind] = {
    "store_url": SampleStore,
    "mlflow_tracking_uri": Tracking,
    "grader_secrets": GraderSecrets,
    "ray_address": RayCluster,
}
Load = Callable[[Any, str], Any]


@dataclass(frozen=True)
class Resolved:
    """A configuration without block names.

    Attributes:
        config: what it was, with the places of its blocks.
        environment: what the run's processes must find; holds secrets, so it is never shown.
    """

    config: RunConfig
    environment: dict[str, str] = field(default_factory=dict, repr=False)


async def resolve(config: RunConfig, load: Load | None = None) -> Resolved:
    """Reads the blocks that a configuration names.

    Args:
        load: reads a document by kind and name; Prefect's API without it.

    Raises:
        ConfigError: a block is not there.
    """
    names = blocks_in(config)
    if not names:
        return Resolved(config)
    documents = {name: await (load or _load)(KINDS[name], names[name]) for name in names}
    environment: dict[str, str] = {}
    for document in documents.values():
        environment |= document.environment()
    over: dict[str, Any] = {}
    if "store_url" in documents:
        over["store_url"] = documents["store_url"].url
    if "mlflow_tracking_uri" in documents:
        block = documents["mlflow_tracking_uri"]
        over["mlflow_tracking_uri"] = block.uri
        if config.tracking.mlflow_experiment_name is None:
            over["mlflow_experiment_name"] = block.experiment
    if "ray_address" in documents:
        over["ray_address"] = documents["ray_address"].address
    return Resolved(load_config(config.model_dump(), over), environment)


async def _load(kind: Any, name: str) -> Any:
    try:
        return await kind.aload(name)
    except ValueError as error:
        raise ConfigError(
            f"block:{name}: Prefect has no {kind._block_type_name} block of that name; make it on "
            f"the page Blocks, or in Python with {kind.__name__}(...).save({name!r})"
        ) from error
