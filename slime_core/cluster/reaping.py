"""Ends what a run has on a Ray cluster, from wherever the cluster can be reached."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from slime_core.cluster.external_ray import ask_about, end, find, join
from slime_core.cluster.supervisor import NAME_PREFIX, NAMESPACE, About
from slime_core.errors import ConfigError

WHY = "a person has ended it (slime reap)"


@dataclass(frozen=True)
class Reaped:
    """What was found and ended.

    Attributes:
        run_id: None where the cluster has nothing of the run.
        about: whose it was; None where its supervisor did not answer any more.
        ended: the processes, in words.
        others: runs that are on the cluster besides.
    """

    run_id: str | None
    about: About | None = None
    ended: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def reap(address: str, run: str) -> Reaped:
    """Ends every process of a run on a cluster. Touches nothing else there.

    Args:
        address: HOST:PORT or auto on a node of the cluster, ray://HOST:10001 from elsewhere.
        run: id of the run, or a beginning that fits one run on the cluster only.

    Raises:
        ConfigError: the cluster cannot be joined, or several runs begin so.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    join(address)
    try:
        names = [entry["name"] for entry in _named()]
        runs = sorted(name.removeprefix(NAME_PREFIX) for name in names)
        fitting = [run] if run in runs else [name for name in runs if name.startswith(run)]
        if len(fitting) > 1:
            raise ConfigError(f"several runs on the cluster begin with {run}: {', '.join(fitting)}")
        supervisor = find(fitting[0]) if fitting else None
        if supervisor is None:
            return Reaped(None, others=runs)
        about = None
        with contextlib.suppress(GetTimeoutError):
            about = ask_about(supervisor)
        ended = end(supervisor, fitting[0], WHY)
        return Reaped(fitting[0], about, ended, [name for name in runs if name != fitting[0]])
    finally:
        ray.shutdown()


def _named() -> list[dict[str, str]]:
    """The supervisors of all runs on the cluster."""
    everybody: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return [
        entry
        for entry in everybody
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(NAME_PREFIX)
    ]
