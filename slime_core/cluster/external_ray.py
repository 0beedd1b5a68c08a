"""A Ray cluster that stands already: joined, used through a supervisor there, never stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import ray
from ray._private import ray_constants
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime_core import __version__
from slime_core.cluster.place import Place
from slime_core.cluster.ray_output import log_to_details
from slime_core.cluster.reach import ClusterFacts
from slime_core.cluster.remote_engine import RemoteEngine
from slime_core.cluster.spawner import EngineOrder
from slime_core.cluster.supervisor import (
    NAMESPACE,
    OPTIONS,
    About,
    Charge,
    Supervisor,
    beat_s,
    supervisor_name,
)
from slime_core.errors import ConfigError, EngineError, SlimeError, StaleOwnerError
from slime_core.run.logs import DETAILS
from slime_core.run.paths import RunPaths
from slime_core.run.process import own_identity
from slime_core.store import layout
from slime_core.waits import poll

log = logging.getLogger(__name__)
details = logging.getLogger(DETAILS)
JOIN_ATTEMPTS = 2
CALL_TIMEOUT_S = 30.0
END_TIMEOUT_S = 45.0
GONE_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Join:
    """What a run brings to a cluster.

    Attributes:
        facts: the cluster.
        store_url: of the run's prefix.
        gpus: GPUs of one node that the run takes for itself; 0 computes on CPUs.
        orphan_timeout_s: see Charge.
        start_timeout_s: deadline for the cluster to make room.
    """

    facts: ClusterFacts
    run_id: str
    store_url: str
    paths: RunPaths
    gpus: int
    orphan_timeout_s: float
    start_timeout_s: float


class ExternalRay:
    """Joins the cluster, ends what an earlier owner of the run left there, and has its own
    supervisor make everything.

    Args:
        epoch: this owner's, once it has the lease.
    """

    def __init__(self, join: Join, epoch: Callable[[], int]) -> None:
        self._join = join
        self._epoch = epoch
        self._supervisor: Any = None
        self._joined = False
        self._restore_logger: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self.makes_engines = True
        self._beats = threading.Thread(target=self._show_life, name="sign of life", daemon=True)

    def start(self) -> None:
        """Joins, and makes the supervisor.

        Raises:
            ConfigError: the cluster cannot be joined, has no room, or does not see this machine's
                files; or a run of the same id and another store is there.
            StaleOwnerError: a newer owner of the run is there.
        """
        if ray.is_initialized():
            raise ConfigError(
                "Ray is in use in this process already: call ray.shutdown() first, or start the "
                "run in another process"
            )
        # Else Ray's C++ core takes SIGTERM past Python (see LocalRay).
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
        self._restore_logger = log_to_details()
        join(self._join.facts.address)
        self._joined = True
        self._end_earlier()
        self._make_supervisor()
        self._beats.start()

    def spawn(
        self, name: str, actor_class: type, options: Mapping[str, Any], *arguments: Any
    ) -> Any:
        """Has an actor created there without waiting for it; returns its handle."""
        return self._ask("spawn", self._epoch(), name, actor_class, dict(options), *arguments)

    def engine(self, order: EngineOrder) -> RemoteEngine:
        """A server there, a child of the supervisor, that is not started yet."""
        number, url = self._ask("new_engine", self._epoch(), order)

        def call(method: str, *arguments: Any, limit_s: float = CALL_TIMEOUT_S) -> Any:
            epoch = self._epoch()
            return self._ask("engine", epoch, number, method, *arguments, limit_s=limit_s)

        return RemoteEngine(url, order.log_path, call, lambda: self._ask("engine_status", number))

    def port(self) -> int:
        """A port for the ranks to meet on, free on their node."""
        return self._ask("free_port")

    def stop(self) -> None:
        """Ends the run's processes there and leaves the cluster to itself."""
        self._stop.set()
        try:
            if self._supervisor is not None:
                end(self._supervisor, self._join.run_id, "the run has ended", self._epoch())
        finally:
            self._supervisor = None
            if self._joined:
                self._joined = False
                ray.shutdown()
            self._restore_logger()

    def _end_earlier(self) -> None:
        """Fences what works for an earlier owner, then ends it: a training call there goes on after
        its caller's death, and only the ledger says what was trained."""
        run_id = self._join.run_id
        earlier = find(run_id)
        if earlier is None:
            return
        try:
            about = ask_about(earlier)
        except GetTimeoutError as error:
            raise EngineError(
                f"an earlier supervisor of run {run_id} does not answer, so it is not known whose "
                f"it is: `slime reap {run_id}` ends it"
            ) from error
        if about is not None and about.store_url != self._join.store_url:
            raise ConfigError(
                f"a run {run_id} of another store ({about.store_url}) is on the Ray cluster: give "
                "this one another --run-id"
            )
        why = f"epoch {self._epoch()} has taken the run over"
        ended = end(earlier, run_id, why, self._epoch())
        log.info("ended what an earlier start had left: %s", ", ".join(ended) or "nothing")

    def _make_supervisor(self) -> None:
        given = self._join
        here = ray.get_runtime_context().get_node_id()
        charge = Charge(
            given.run_id,
            given.store_url,
            self._epoch(),
            own_identity().describe(),
            given.orphan_timeout_s,
            Place.here(),
            given.paths.logs,
            here,
        )
        made = ray.remote(**OPTIONS)(Supervisor).options(
            name=supervisor_name(given.run_id),
            namespace=NAMESPACE,
            lifetime="detached",
            num_gpus=given.gpus or None,
            # Without GPUs any node will do, and this one sees our files.
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=given.gpus > 0),
        )
        try:
            self._supervisor = made.remote(charge)
            about: About = ray.get(self._supervisor.about.remote(), timeout=given.start_timeout_s)
        except ValueError as error:
            raise StaleOwnerError(
                f"another start of run {given.run_id} joined the cluster at the same moment"
            ) from error
        except GetTimeoutError as error:
            ray.kill(self._supervisor, no_restart=True)
            self._supervisor = None
            wanted = f"node with {given.gpus} free GPUs" if given.gpus else "room for an actor"
            raise ConfigError(
                f"the Ray cluster {given.facts.address} had no {wanted} within "
                f"{given.start_timeout_s:.0f} s (start_timeout_s)"
            ) from error
        except RayError as error:
            self._supervisor = None
            details.error("the supervisor was not made:\n%s", error)
            raise ConfigError(
                f"the Ray cluster {given.facts.address} cannot run slime-flow: {_reason(error)}; "
                "its nodes need the environment of this command, or ray job submit --working-dir ."
            ) from error
        if about.version != __version__:
            raise ConfigError(
                f"node {about.host} of the Ray cluster has slime-flow {about.version}, this "
                f"command {__version__}: start both from the same environment"
            )
        if about.node != here:
            self._check_files(about)

    def _check_files(self, about: About) -> None:
        """The processes work on files of the workspace and of the store."""
        given = self._join
        files = [given.paths.logs / "driver.log"]
        store = urlsplit(given.store_url)
        if store.scheme in ("", "file"):
            files.append(Path(unquote(store.path)) / layout.epoch(self._epoch()))
        if missing := self._ask("sees", files):
            raise ConfigError(
                f"node {about.host} of the Ray cluster does not see {missing[0]}: put workspace "
                "and store into a folder that all nodes share"
            )

    def _show_life(self) -> None:
        interval_s = beat_s(self._join.orphan_timeout_s)
        while not self._stop.wait(interval_s):
            supervisor = self._supervisor
            if supervisor is None:
                return
            try:
                ray.get(supervisor.ping.remote(self._epoch()), timeout=interval_s)
            except (ActorDiedError, RayTaskError) as error:
                if not self._stop.is_set():
                    details.error("the supervisor of the run has gone:\n%s", error)
                    log.error("the run's processes on the cluster were ended: %s", _reason(error))
                return
            except RayError as error:  # late, or the network is away for a moment
                log.warning("the supervisor of the run does not answer: %s", _reason(error))

    def _ask(self, method: str, *arguments: Any, limit_s: float = CALL_TIMEOUT_S) -> Any:
        """Calls the supervisor; errors are of our own types."""
        if self._supervisor is None:
            raise EngineError("the run has no supervisor on the cluster any more")
        try:
            pending = getattr(self._supervisor, method).remote(*arguments)
            return ray.get(pending, timeout=limit_s)
        except RayTaskError as error:
            if isinstance(error.cause, SlimeError):
                raise error.cause from error
            details.error("the supervisor's %s failed:\n%s", method, error)
            raise EngineError(f"the supervisor's {method} failed: {error.cause!r}") from error
        except RayError as error:
            details.error("the supervisor's %s failed:\n%s", method, error)
            raise EngineError(
                f"the supervisor of the run on the cluster has gone or does not answer ({method}): "
                "the same command goes on"
            ) from error


def join(address: str) -> None:
    """Makes this process a driver of a cluster.

    Raises:
        ConfigError: Ray refuses; in its words.
    """
    for attempt in range(JOIN_ATTEMPTS):
        try:
            with ThreadPoolExecutor(1, "ray") as pool:  # its caller can be interrupted meanwhile
                pool.submit(
                    ray.init,
                    address=address,
                    namespace=NAMESPACE,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                ).result()
            return
        except (OSError, RuntimeError, ValueError, ImportError, RayError) as error:
            if isinstance(error, ConnectionError) and attempt + 1 < JOIN_ATTEMPTS:
                continue  # ray:// starts a server for each client, which may take a busy node long
            raise ConfigError(f"the Ray cluster {address} refuses: {_reason(error)}") from error


def find(run_id: str) -> Any | None:
    """The supervisor of a run on the cluster that was joined."""
    try:
        return ray.get_actor(supervisor_name(run_id), NAMESPACE)
    except ValueError:
        return None


def ask_about(supervisor: Any) -> About | None:
    """What a supervisor says of itself; None where it has gone.

    Raises:
        GetTimeoutError: it does not answer.
    """
    try:
        return ray.get(supervisor.about.remote(), timeout=CALL_TIMEOUT_S)
    except RayActorError:
        return None


def end(supervisor: Any, run_id: str, why: str, epoch: int | None = None) -> list[str]:
    """Has a run's supervisor end everything, and waits until it has gone itself.

    Args:
        epoch: see Supervisor.end.

    Returns:
        What was ended.
    """
    try:
        ended = ray.get(supervisor.end.remote(why, epoch), timeout=END_TIMEOUT_S)
    except RayTaskError as error:
        if isinstance(error.cause, SlimeError):
            raise error.cause from error
        raise
    except (RayActorError, GetTimeoutError):
        ended = []  # what it owned ends with it
    ray.kill(supervisor, no_restart=True)
    name = f"the supervisor of run {run_id} to end"
    poll(name, GONE_TIMEOUT_S, lambda: True if find(run_id) is None else None)
    return ended


def _reason(error: BaseException) -> str:
    """What Ray says, without its pages: the last line of a traceback is the error itself."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, RayTaskError):
        return lines[-1]
    return f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]
