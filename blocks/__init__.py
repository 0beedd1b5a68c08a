"""Prefect blocks: places and secrets that a configuration names as `block:NAME`."""

from blocks.grader_secrets import GraderSecrets
from blocks.ray_cluster import RayCluster
from blocks.sample_store import SampleStore
from blocks.sglang_endpoints import SGLangEndpoints
from blocks.tracking import Tracking

ALL = (SampleStore, Tracking, GraderSecrets, SGLangEndpoints, RayCluster)

__all__ = ["ALL", "GraderSecrets", "RayCluster", "SGLangEndpoints", "SampleStore", "Tracking"]
