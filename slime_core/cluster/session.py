"""The processes of a run: started side by side, waited for together, ended together.

Lifetime *owned*: Ray, the trainer's ranks, the rollout worker and the engines belong to this
process and end with it. Lifetime *external*: Ray stands already, and a supervisor there owns the
others for this process.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, TypeVar

from slime_core.cluster.address import cluster_address
from slime_core.cluster.device import resolve_device
from slime_core.cluster.engine_choice import engine_options, resolve_engine
from slime_core.cluster.engine_pool import EnginePool, PoolLimits
from slime_core.cluster.external_ray import ExternalRay, Join
from slime_core.cluster.local_ray import LocalRay
from slime_core.cluster.reach import ClusterFacts, cluster_facts
from slime_core.cluster.rollout_group import RolloutGroup
from slime_core.cluster.spawner import EngineOrder, EngineServer, Spawner
from slime_core.cluster.trainer_group import TrainerGroup
from slime_core.cluster.trainer_settings import model_facts, trainer_settings, training_dtype
from slime_core.config.fields import identity_digest
from slime_core.config.secrets import hidden
from slime_core.config.tree import RunConfig
from slime_core.engines.client import EngineClient
from slime_core.plugins.args_view import ArgsView
from slime_core.rollout.settings import RolloutSettings
from slime_core.run.context import RunContext
from slime_core.run.epoch import Lease, give_back
from slime_core.run.identity import record_run
from slime_core.run.logs import log_to_file
from slime_core.run.paths import RunPaths, store_url
from slime_core.run.stop_request import asked
from slime_core.store.backend import Backend, join_url, open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.ledger import initial_state
from slime_core.store.source import BatchSource
from slime_core.tracking.outbox import Outbox, Tracker
from slime_core.waits import together
from slime_core.weights.sync.canary import tolerance_for
from slime_core.weights.sync.machine import Transport, WeightSync
from slime_core.weights.sync.post_write import PostWrite
from slime_core.weights.sync.transports.disk import DiskTransport
from slime_core.weights.sync.transports.tensor import TensorTransport

log = logging.getLogger(__name__)
TRACKER_TIMEOUT_S = 30.0
LEASE_TIMEOUT_S = 30.0
# A stop is to end within nine seconds. The outbox keeps the rest, and a lease runs out by itself.
TRACKER_TIMEOUT_OF_A_STOP_S = 4.0
LEASE_TIMEOUT_OF_A_STOP_S = 2.0
WEIGHTS_TIMEOUT_S = 1800.0
T = TypeVar("T")
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class Session:
    """Holds what was started for one run. Use `start`, then `ready`, and always `close`."""

    def __init__(self, config: RunConfig, run_id: str, trackers: Sequence[Tracker]) -> None:
        self.config = config
        self.run_id = run_id
        facts = None if (address := cluster_address(config)) is None else cluster_facts(address)
        self.device: Literal["cpu", "cuda"] = resolve_device(
            config, cluster_gpus=facts and facts.gpus_of_a_node
        )
        self.paths = RunPaths.create(config.run.workspace, run_id)
        url = store_url(config.run.workspace, config.store.store_url)
        self.store_url = url
        fsync = config.store.store_fsync
        self.backend = open_backend(join_url(url, run_id), fsync=fsync)
        self.root = open_backend(url, fsync=fsync)
        self.trackers = trackers
        self.lease: Lease | None = None
        self._ray = self._ray_of(facts)
        self.trainer = self._trainer_group()
        self.rollout = self._rollout_group()
        self.engines = self._engine_pool()
        self.outbox: Outbox | None = None
        self._stop_logging: Callable[[], None] = lambda: None
        self._up: Callable[[str], None] = lambda part: None

    @classmethod
    def start(
        cls,
        config: RunConfig,
        run_id: str,
        *,
        take_over: bool = False,
        trackers: Sequence[Tracker] = (),
        up: Callable[[str], None] = lambda part: None,
        owned: Callable[[Lease], None] = lambda lease: None,
        recorded: RunConfig | None = None,
    ) -> Session:
        """Takes the run's lease and starts all processes without waiting for them.

        Args:
            take_over: do not wait for a silent owner.
            trackers: where metrics go besides metrics.jsonl.
            up: is told when a part has come up: Ray, trainer, rollout worker, engines.
            owned: is given the lease once this process owns the run, before anything is started.
            recorded: the configuration to keep with the run, where it is written otherwise than
                `config` (it names blocks).

        Raises:
            ConfigError: the run has another identity, or the model folder is unusable.
            StoreError: the store cannot be written, or the run has a living owner.
        """
        session = cls(config, run_id, trackers)
        session._up = up
        log_file = session.paths.logs / "driver.log"
        session._stop_logging = log_to_file(log_file, config.debug.log_level)
        try:
            record_run(session.root, session.backend, recorded or config, run_id)
            session.lease = Lease.acquire(
                session.backend,
                ttl_s=config.store.lease_ttl_s,
                config_digest=identity_digest(config),
                take_over=take_over,
            )
            owned(session.lease)
            session._start_processes()
        except BaseException:
            _run_beside(session.close("failed"))
            raise
        return session

    def stop_asked(self) -> bool:
        """Whether somebody wants this owner to stop between two iterations."""
        return self.lease is not None and asked(self.paths.local, self.lease.epoch)

    async def ready(self) -> RunContext:
        """Waits for everything and makes the context that stages work with.

        Raises:
            SlimeError: something did not come up; names it.
        """
        assert self.lease is not None
        trainer = asyncio.ensure_future(self._trainer_ready())
        rollout = asyncio.ensure_future(self._told("rollout worker", self.rollout.ready()))
        # Where one fails, the others are not waited for any more: what they would say comes from
        # our ending them.
        await together([trainer, rollout, self._told("engines", self.engines.ready())])
        built, facts = trainer.result(), rollout.result()
        config = self.config
        self.outbox = Outbox(
            self.paths.local,
            self.backend,
            config.cluster.rollout_num_gpus,
            self.trackers,
            untrained=config.debug.debug_rollout_only,
        )
        return RunContext(
            config=config,
            run_id=self.run_id,
            paths=self.paths,
            backend=self.backend,
            cache=NodeCache(self.backend, self.paths.cache),
            lease=self.lease,
            trainer=self.trainer,
            rollout=self.rollout,
            engines=self.engines,
            weight_sync=self._weight_sync(),
            outbox=self.outbox,
            start_state=initial_state(built["weights_digest"]),
            model=model_facts(config.rollout.hf_checkpoint),
            facts=facts,
        )

    async def close(self, reason: str) -> list[str]:
        """Ends all processes, sends what metrics are left, gives the lease back.

        Args:
            reason: finished, interrupted or failed.

        Returns:
            Sentences about metrics that did not reach a tracker.
        """
        left: list[str] = []
        async with AsyncExitStack() as later:  # the last pushed comes first; all are tried
            later.callback(self._stop_logging)
            stop = reason == "interrupted"
            if self.lease is not None:
                limit_s = LEASE_TIMEOUT_OF_A_STOP_S if stop else LEASE_TIMEOUT_S
                later.push_async_callback(give_back, self.lease, limit_s)
            later.callback(self._ray.stop)
            later.push_async_callback(self.engines.close)
            later.callback(self.trainer.close)
            later.callback(self.rollout.stop)
            if self.outbox is not None:
                limit_s = TRACKER_TIMEOUT_OF_A_STOP_S if stop else TRACKER_TIMEOUT_S
                if self.config.tracking.mlflow_log_final_weights and reason == "finished":
                    limit_s = WEIGHTS_TIMEOUT_S
                left = await asyncio.to_thread(self.outbox.close, STATUS[reason], limit_s)
        return left

    def _start_processes(self) -> None:
        _empty(self.paths.weights)
        if not self._ray.makes_engines:
            self.engines.start()  # so they load while Ray starts
        self._ray.start()
        self._up("Ray")
        if self._ray.makes_engines:
            self.engines.start()
        if not self.config.debug.debug_rollout_only:
            self.trainer.start()
        self.rollout.start()

    async def _trainer_ready(self) -> dict[str, Any]:
        if self.config.debug.debug_rollout_only:
            return {"weights_digest": "none"}
        return await self._told("trainer", self.trainer.ready())

    async def _told(self, part: str, coming: Awaitable[T]) -> T:
        result = await coming
        self._up(part)
        return result

    def _ray_of(self, facts: ClusterFacts | None) -> Spawner:
        if facts is None:
            return LocalRay(self.paths.local / "ray-folder")
        config = self.config
        ranks = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
        ranks = 0 if config.debug.debug_rollout_only else ranks
        engines = 0 if config.debug.debug_train_only else config.cluster.rollout_num_gpus
        gpus = max(ranks, engines) if self.device == "cuda" else 0
        tolerance = config.fault_tolerance
        join = Join(
            facts,
            self.run_id,
            self.backend.url,
            self.paths,
            gpus,
            tolerance.orphan_timeout_s,
            tolerance.start_timeout_s,
        )
        return ExternalRay(join, self._own_epoch)

    def _own_epoch(self) -> int:
        assert self.lease is not None
        return self.lease.epoch

    def _trainer_group(self) -> TrainerGroup:
        config = self.config
        world = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
        world = 0 if config.debug.debug_rollout_only else world
        ports: dict[int, int] = {}

        def settings_of(given: RunConfig, rank: int, build: int) -> Any:
            port = ports.get(build) or ports.setdefault(build, self._ray.port())
            return trainer_settings(given, self.device, rank, port)

        return TrainerGroup(
            self._ray,
            config,
            settings_of,
            world,
            BatchSource(self.backend.url, config.store.store_fsync, self.paths.cache),
            self.paths.logs,
            config.fault_tolerance.start_timeout_s,
            config.fault_tolerance.stage_timeout_s,
        )

    def _rollout_group(self) -> RolloutGroup:
        config = self.config
        settings = RolloutSettings(
            config=config,
            run_id=self.run_id,
            store_url=self.store_url,
            cache=self.paths.cache,
            log_file=self.paths.logs / "rollout-0.log",
        )
        tolerance = config.fault_tolerance
        return RolloutGroup(
            self._ray, settings, tolerance.start_timeout_s, tolerance.stage_timeout_s
        )

    def _engine_pool(self) -> EnginePool:
        config, dtype = self.config, model_facts(self.config.rollout.hf_checkpoint)["dtype"]
        kind = resolve_engine(config, self.device)
        options = engine_options(config, kind, self.device, training_dtype(config, dtype))

        def spawn(index: int) -> tuple[EngineServer, EngineClient]:
            log_path = self.paths.logs / f"engine-{index}.log"
            threads = config.cluster.threads_per_process
            model = config.rollout.hf_checkpoint
            process = self._ray.engine(EngineOrder(kind, model, log_path, options, threads))
            return process, EngineClient(process.url)

        size = config.cluster.rollout_num_gpus // config.cluster.rollout_num_gpus_per_engine
        size = 0 if config.debug.debug_train_only else size
        limits = PoolLimits(
            config.fault_tolerance.start_timeout_s, config.fault_tolerance.engine_restarts
        )
        return EnginePool(spawn, size, limits)

    def _weight_sync(self) -> WeightSync:
        sync = self.config.sync
        dtype = training_dtype(self.config, model_facts(self.config.rollout.hf_checkpoint)["dtype"])
        transport: Transport
        if sync.update_weight_transport == "disk":
            transport = DiskTransport(
                self.paths.weights,
                lambda folder, version: self.trainer.invoke("export_hf", folder, version),
                self._post_write(),
            )
        else:
            transport = TensorTransport(
                self.trainer.buckets, self.trainer.release_buckets, sync.update_weight_buffer_size
            )
        kind = resolve_engine(self.config, self.device)
        tolerance = tolerance_for(dtype, sync.canary_tolerance, kind)
        return WeightSync(
            self.rollout, transport, self.config.fault_tolerance.sync_timeout_s, tolerance
        )

    def _post_write(self) -> PostWrite | None:
        config = self.config
        path = config.sync.custom_update_weight_post_write_path
        if path is None:
            return None

        def engines() -> dict[str, str]:
            return {name: client.url for name, client in self.engines.clients().items()}

        limit_s = config.fault_tolerance.sync_timeout_s / 2
        return PostWrite(path, ArgsView(hidden(config)), engines, limit_s)


def _empty(folder: Path) -> None:
    """Removes what earlier processes left in a folder of ours."""
    for item in folder.iterdir():
        if item.is_dir():
            shutil.rmtree(item)
        else:
            item.unlink()


def run_backend(config: RunConfig, run_id: str) -> Backend:
    """The store below a run's prefix, for readers."""
    url = store_url(config.run.workspace, config.store.store_url)
    return open_backend(join_url(url, run_id))


def _run_beside(work: Coroutine[Any, Any, Any]) -> None:
    """Runs a coroutine to its end on a loop of its own, also where a loop is running already (a
    flow that a Prefect worker started)."""
    thread = threading.Thread(target=asyncio.run, args=(work,), name="close")
    thread.start()
    thread.join()
