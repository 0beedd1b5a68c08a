"""The runs of a workspace that are alive, as their leases tell."""

from __future__ import annotations

from dataclasses import dataclass

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
        live = live_run(open_backend(join_url(url, run_id)), run_id)
        if live is not None:
            found.append(live)
    return found


def held_by(worker: Service) -> list[psutil.Process]:
    """The flow processes that a worker has started."""
    try:
        return psutil.Process(worker.process.pid).children()
    except psutil.NoSuchProcess:
        return []
