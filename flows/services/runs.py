"""The runs of a workspace that are alive, as their leases tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psutil

from flows.services.processes import Service
from slime_core.run.epoch import newest_epoch, owner_of
from slime_core.run.identity import list_runs
from slime_core.run.process import ProcessIdentity
from slime_core.store.backend import Backend, join_url, open_backend


@dataclass(frozen=True)
class LiveRun:
    """A run with an owner that is not known to be gone."""

    run_id: str
    epoch: int
    owner: ProcessIdentity

    @property
    def here(self) -> bool:
        """Its process lives on this machine, so it can be sent a signal."""
        return self.owner.is_gone() is False


def live_run(run: Backend, run_id: str) -> LiveRun | None:
    """The run, if its newest owner has neither ended nor died."""
    newest = newest_epoch(run)
    if newest is None or newest.ended:
        return None
    owner, _ = owner_of(run, newest.epoch)
    return None if owner.is_gone() else LiveRun(run_id, newest.epoch, owner)


def is_dead(run: Backend) -> bool:
    """Whether the newest owner's process is proven to be gone."""
    newest = newest_epoch(run)
    return newest is not None and owner_of(run, newest.epoch)[0].is_gone() is True


def live_runs(root: Backend, url: str) -> list[LiveRun]:
    """Every run of a store with a living owner."""
    found = []
    for run in list_runs(root):
        run_id = run.body["run_id"]
        live = live_run(open_backend(join_url(url, run_id), read_only=True), run_id)
        if live is not None:
            found.append(live)
    return found


def orphans(worker: Service | None) -> Callable[[UUID], bool]:
    """Tells of a deployment's flow run whether its process is proven to be gone.

    The workspace's server listens on the loopback address, so its workers are of this machine.
    Once the last of them is proven to be gone no process is started any more, and what is left of
    earlier ones has the id of its flow run in its environment.
    """
    if worker is None or worker.process.is_gone() is not True:
        return lambda _: False
    alive = _flow_runs_here()
    return lambda flow_run_id: str(flow_run_id) not in alive


def _flow_runs_here() -> set[str]:
    """Ids of the flow runs that processes of this user work for."""
    found: set[str] = set()
    for process in psutil.process_iter():
        try:
            found.add(process.environ().get("PREFECT__FLOW_RUN_ID", ""))
        except psutil.Error:
            continue  # another user's, whose worker would be, too, or one that has just ended
    return found


def users_of(server: Service, workspace: Path) -> list[LiveRun]:
    """The runs in the workspace's own store whose process is connected to a server."""
    store = workspace / "store"
    if not store.is_dir():
        return []
    runs = live_runs(open_backend(str(store), read_only=True), str(store))
    return [run for run in runs if run.here and _is_connected(run.owner.pid, server.port)]


def _is_connected(pid: int, port: int) -> bool:
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return False
    return any(one.raddr and one.raddr.port == port for one in connections)


def held_by(worker: Service) -> list[psutil.Process]:
    """The flow processes that a worker has started."""
    try:
        return psutil.Process(worker.process.pid).children()
    except psutil.NoSuchProcess:
        return []
