"""The Ray cluster of a run, where it uses one that stands already."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from slime_core.check.findings import Findings
from slime_core.cluster.address import cluster_address
from slime_core.cluster.reach import ClusterFacts, cluster_facts
from slime_core.config.tree import RunConfig
from slime_core.run.paths import store_url

UNPACKED = "_ray_pkg_"
"""How Ray names the folders that it unpacks a job's --working-dir into."""


def check_cluster(config: RunConfig, findings: Findings) -> ClusterFacts | None:
    """Asks the cluster; None where the run starts a Ray of its own, or there is a problem."""
    _check_lasting(config, findings)
    address = findings.attempt(lambda: cluster_address(config))
    if address is None:
        return None
    facts = findings.attempt(lambda: cluster_facts(address))
    if facts is not None:
        findings.fact("places", ray=facts.describe())
    return facts


def _check_lasting(config: RunConfig, findings: Findings) -> None:
    parts = urlsplit(store_url(config.run.workspace, config.store.store_url))
    store = Path(unquote(parts.path))
    inside = any(part.startswith(UNPACKED) for part in store.absolute().parts)
    if inside and parts.scheme in ("", "file"):
        findings.problem(
            f"store {store} is in the folder that Ray has unpacked the job into and deletes after "
            "it: give --workspace with a folder that lasts, or --store-url s3://..."
        )
