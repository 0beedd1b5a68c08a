"""The owner of a run's processes on a Ray cluster that the run did not start.

Actors that it creates end with it, and the engines are its children. It knows the epoch of the
command that it works for, hears from it every few seconds, and ends everything when it does not any
more: on a cluster that lives on, nobody else would. It and what it owns are on one node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.state as ray_state
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime_core import __version__
from slime_core.cluster.engine_maker import LOOPBACK, EngineMaker
from slime_core.cluster.place import Place
from slime_core.cluster.spawner import EngineOrder
from slime_core.engines.launcher import EngineProcess, free_port
from slime_core.errors import StaleOwnerError
from slime_core.run.logs import log_to_file

log = logging.getLogger(__name__)
NAMESPACE = "slime-flow"
NAME_PREFIX = "slime-run-"
OPTIONS: dict[str, Any] = {"num_cpus": 0.0, "max_restarts": 0, "max_concurrency": 32}
BEATS_PER_TIMEOUT = 4
BEAT_MOST_S = 5.0
GRACE_S = 1.0
KILLED_S = 20.0
LEAVE_S = 1.0
"""Who asked for the end reads the answer before the supervisor has gone."""


def supervisor_name(run_id: str) -> str:
    """Name of a run's supervisor among the actors of a cluster."""
    return f"{NAME_PREFIX}{run_id}"


def beat_s(orphan_timeout_s: float) -> float:
    """Seconds between two signs of life."""
    return min(BEAT_MOST_S, orphan_timeout_s / BEATS_PER_TIMEOUT)


@dataclass(frozen=True)
class Charge:
    """What a supervisor is told when it is made.

    Attributes:
        store_url: of the run's prefix; tells two runs of one id apart.
        owner: the command, for people.
        orphan_timeout_s: seconds without a sign of life of the owner after which it ends the run.
        place: environment and folder of the command.
        driver_node: id of the node that the command is on.
    """

    run_id: str
    store_url: str
    epoch: int
    owner: str
    orphan_timeout_s: float
    place: Place
    logs: Path
    driver_node: str


@dataclass(frozen=True)
class About:
    """What a supervisor says of itself.

    Attributes:
        silent_s: seconds since the last sign of life of its owner.
        node, host: where it is.
        version: of slime-flow.
    """

    run_id: str
    store_url: str
    epoch: int
    owner: str
    silent_s: float
    node: str
    host: str
    version: str


class Supervisor:
    """Made once per owner of a run, as a detached actor with several threads."""

    def __init__(self, charge: Charge) -> None:
        charge.place.take()
        if charge.logs.is_dir():
            log_to_file(charge.logs / "supervisor.log", "INFO")
        context = ray.get_runtime_context()
        self._charge = charge
        self._epoch = charge.epoch
        self._node: str = context.get_node_id()
        self._me: Any = context.current_actor
        near = self._node == charge.driver_node
        self._maker = EngineMaker(LOOPBACK if near else ray.util.get_node_ip_address())
        self._actors: list[tuple[str, Any]] = []
        self._engines: list[EngineProcess] = []
        self._lock = threading.RLock()
        self._heard_s = time.monotonic()
        self._ended: list[str] | None = None
        self._why = ""
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="orphan watch", daemon=True).start()

    def about(self) -> About:
        """Whose it is, and how its owner is."""
        charge, silent_s = self._charge, time.monotonic() - self._heard_s
        host = ray.util.get_node_ip_address()
        return About(
            charge.run_id, charge.store_url, self._epoch, charge.owner, silent_s, self._node,
            host, __version__,
        )  # fmt: skip

    def sees(self, paths: list[Path]) -> list[Path]:
        """Those of some files of the command that are not there on this node."""
        return [path for path in paths if not path.exists()]

    def ping(self, epoch: int) -> None:
        """A sign of life of the owner."""
        self._check(epoch)
        self._heard_s = time.monotonic()

    def free_port(self) -> int:
        """A port for the ranks to meet on."""
        return free_port()

    def spawn(
        self, epoch: int, name: str, actor_class: type, options: Mapping[str, Any], *arguments: Any
    ) -> Any:
        """Creates an actor beside this one; returns its handle."""
        here = NodeAffinitySchedulingStrategy(self._node, soft=False)
        with self._lock:
            self._check(epoch)
            made = ray.remote(**options)(actor_class).options(scheduling_strategy=here)
            actor = made.remote(*arguments, place=self._place())
            self._actors.append((name, actor))
        return actor

    def new_engine(self, epoch: int, order: EngineOrder) -> tuple[int, str]:
        """Makes an engine that is not started yet; returns its number here and its address."""
        with self._lock:
            self._check(epoch)
            self._engines.append(self._maker.make(order))
            return len(self._engines) - 1, self._engines[-1].url

    def engine(self, epoch: int, number: int, method: str, *arguments: Any) -> Any:
        """Calls a method of an engine, such as start or wait_healthy."""
        with self._lock:
            self._check(epoch)
            call = getattr(self._engines[number], method)
        return call(*arguments)

    def engine_status(self, number: int) -> tuple[int | None, bool, int | None]:
        """(process, whether it lives, exit status) of an engine."""
        engine = self._engines[number]
        return engine.pid, engine.alive, engine.returncode

    def end(self, why: str, epoch: int | None = None) -> list[str]:
        """Takes no more calls of the owner, ends every process of the run, and then itself.

        Args:
            why: what the owner is told should it come back.
            epoch: of whoever takes the run over; None where a person ends it.

        Returns:
            What was ended, in words.

        Raises:
            StaleOwnerError: the caller's epoch is older than the owner's.
        """
        if epoch is not None and epoch < self._epoch:
            raise self._stale(epoch)
        with self._lock:
            if self._ended is None:
                self._why = why
                self._ended = []
                try:
                    self._ended = self._end_all()
                finally:
                    self._over.set()
                log.info("%s: ended %s", why, ", ".join(self._ended) or "nothing")
            return self._ended

    def _end_all(self) -> list[str]:
        processes = self._processes()
        families = [(name, _family(pid)) for name, pid in processes]
        for _, actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)
        for engine in self._engines:
            if engine.alive:
                engine.kill()
        members = [member for _, family in families for member in family]
        _, left = psutil.wait_procs(members, timeout=GRACE_S)
        for member in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        _, left = psutil.wait_procs(left, timeout=KILLED_S)
        if left:
            log.error("could not be ended: %s", [member.pid for member in left])
        self._maker.release()
        return [f"{name} (process {pid})" for (name, pid), (_, f) in zip(processes, families,
                strict=True) if f]  # fmt: skip

    def _processes(self) -> list[tuple[str, int]]:
        """Name and process of what lives; an actor that is still being made has no process."""
        found = []
        for name, actor in self._actors:
            known = ray_state.actors(actor._actor_id.hex())
            if known and known.get("State") != "DEAD" and known.get("Pid"):
                found.append((name, int(known["Pid"])))
        for engine in self._engines:
            if engine.alive and engine.pid is not None:
                found.append((engine.log_path.stem, engine.pid))
        return found

    def _place(self) -> Place:
        """The command's, with the GPUs that Ray gave this actor for all of the run."""
        name = "CUDA_VISIBLE_DEVICES"
        mine = {name: os.environ[name]} if name in os.environ else {}
        return dataclasses.replace(
            self._charge.place, variables={**self._charge.place.variables, **mine}
        )

    def _check(self, epoch: int) -> None:
        if epoch != self._epoch or self._ended is not None:
            raise self._stale(epoch)

    def _stale(self, epoch: int) -> StaleOwnerError:
        why = f": {self._why}" if self._why else ""
        return StaleOwnerError(
            f"the processes of run {self._charge.run_id} on the cluster do not belong to epoch "
            f"{epoch} any more{why}"
        )

    def _watch(self) -> None:
        limit_s = self._charge.orphan_timeout_s
        while not self._over.wait(beat_s(limit_s) / 2):
            silent_s = time.monotonic() - self._heard_s
            if silent_s > limit_s:
                self.end(f"nothing was heard of {self._charge.owner} for {silent_s:.0f} s")
        time.sleep(LEAVE_S)
        ray.kill(self._me, no_restart=True)


def _family(pid: int) -> list[psutil.Process]:
    """A process and what it has started; nothing where it has gone."""
    try:
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
