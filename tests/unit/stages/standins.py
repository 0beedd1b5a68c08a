"""A run whose store is real and whose processes are stand-ins that can be told to fail.

Weights are a text that follows from what was trained; engines serve a copy of it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_core.cluster.engine_pool import EnginePool, PoolLimits
from slime_core.cluster.train_call import TrainCall
from slime_core.config.loading import load_config
from slime_core.config.tree import RunConfig
from slime_core.engines.health import HealthRules
from slime_core.errors import EngineError, TrainerError
from slime_core.refs import Ref, digest_of
from slime_core.run.context import RunContext
from slime_core.run.epoch import Lease
from slime_core.run.paths import RunPaths
from slime_core.store.backend import open_backend
from slime_core.store.batch import put_batch
from slime_core.store.cache import NodeCache
from slime_core.store.draws import log_draws
from slime_core.store.ledger import initial_state
from slime_core.tracking.outbox import Outbox
from slime_core.weights.sync.machine import WeightSync
from tests.unit.config.trees import SMALL
from tests.unit.store.builders import batch_content, draw, group_rows, seal_segment, write_groups

INITIAL = "weights 0"
GROUPS = 2
Hook = Callable[[TrainCall], None]


class StandInTrainer:
    """Ranks that train text. Attributes that tests set:

    Attributes:
        before: called with each TrainCall; raises what is to fail.
        skips: iterations whose step is not finite.
        drifts: iterations whose replay gives other weights.
        log: what was asked for.
        lr: what the present ranks train with.
        written: whether the ranks have written the files of a save that was begun.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config, self.lr = config, config.train.lr
        self.before: Hook = lambda call: None
        self.skips: set[int] = set()
        self.drifts: set[int] = set()
        self.log: list[str] = []
        self.builds = 0
        self.written = True
        self._fresh()

    def _fresh(self) -> None:
        self.weights, self.state, self.tainted = INITIAL, "", False
        self.results: dict[str, Any] = {}
        self.epoch = -1
        self.begun: tuple[str, str] | None = None

    async def rebuild(self, config: RunConfig | None = None) -> None:
        self.log.append("rebuild")
        self.builds += 1
        self.lr = (config or self._config).train.lr
        self._fresh()

    async def fence(self, epoch: int) -> None:
        self.log.append(f"fence {epoch}")
        self.epoch = epoch

    async def status(self) -> dict[str, Any]:
        if self.tainted:
            raise TrainerError("the trainer is tainted by an earlier error")
        return {"state": self.state, "epoch": self.epoch, "busy": False, "tainted": False}

    async def result_of(self, state: str) -> Any:
        return self.results.get(state)

    async def train(self, call: TrainCall) -> dict[str, Any]:
        replay = call.forced_skips is not None
        self.log.append(f"{'replay' if replay else 'train'} {call.iteration}")
        if self.state != call.expect:
            raise TrainerError(f"at {self.state[:8]}, not at {call.expect[:8]}")
        try:
            self.before(call)
        except BaseException:
            self.tainted = True
            raise
        skipped = call.forced_skips[0] if replay else call.iteration in self.skips
        if not skipped:
            noise = "other" if replay and call.iteration in self.drifts else ""
            self.weights = digest_of([self.weights, call.batch_digest, call.seed, self.lr, noise])
        step = {"loss": 0.5, "skipped": skipped, "weights_digest": self.weights}
        result = {"state": call.next_state, "steps": [step], "metrics": {}, "seconds": {"all": 1.0}}
        self.state, self.results[call.next_state] = call.next_state, result
        return copy.deepcopy(result)

    async def save_written(self) -> bool:
        return self.written

    async def invoke(self, method: str, *args: Any) -> Any:
        self.log.append(method)
        if method == "begin_save":
            self.begun = (args[0], json.dumps([self.state, self.weights]))
        elif method == "finish_save":
            if self.begun is None:
                raise TrainerError("no checkpoint is in the making")
            (folder, content), self.begun = self.begun, None
            Path(folder).mkdir()
            Path(folder, "rank").write_text(content)
        elif method == "set_state":
            self.state = args[0]
        elif method == "save":
            Path(args[0]).mkdir()
            Path(args[0], "rank").write_text(json.dumps([self.state, self.weights]))
        elif method == "load":
            self.state, self.weights = json.loads(Path(args[0], "rank").read_text())
            return {"state": self.state}
        elif method == "canary":
            return log_probs_of(self.weights, len(args[0]))
        return None


def log_probs_of(weights: str, tokens: int) -> list[float]:
    """What weights say about the canary."""
    number = int(digest_of(weights)[:8], 16) / 2**32
    return [-number - i for i in range(tokens - 1)]


class StandInEngine:
    """A client and process in one. `failing` names calls that raise; `deaths` calls that kill."""

    def __init__(self, index: int, serial: int) -> None:
        self.url = f"http://engine-{index}/{serial}"
        self.weights, self.version = INITIAL, "default"
        self.alive, self.starts = False, True
        self.failing: set[str] = set()
        self.log_path = Path("engine.log")
        self.returncode = None

    def start(self) -> None:
        self.alive = self.starts

    def terminate(self) -> None:
        self.alive = False

    def wait_healthy(self, deadline_s: float) -> None:
        if not self.alive:
            raise EngineError(f"{self.url} ended with status 2; port in use")

    async def close(self) -> None:
        return

    async def health(self, timeout_s: float = 10.0) -> bool:
        return self.alive and "health" not in self.failing

    async def pause(self, mode: str) -> None:
        self._answer("pause")

    async def flush_cache(self) -> bool:
        return True

    async def resume(self) -> None:
        return

    async def set_weight_version(self, version: str) -> None:
        self._answer("set_weight_version")
        self.version = version

    async def score_versioned(self, tokens: Any) -> tuple[list[float], str]:
        self._answer("score")
        return log_probs_of(self.weights, len(tokens)), self.version

    def _answer(self, call: str) -> None:
        if not self.alive or call in self.failing:
            raise EngineError(f"{self.url} cannot be reached")


class StandInTransport:
    """Copies the trainer's weights."""

    def __init__(self, trainer: StandInTrainer) -> None:
        self._trainer = trainer
        self.prepared: list[str] = []

    async def prepare(self, version: str) -> None:
        self.prepared.append(version)

    async def send(self, client: Any, version: str) -> None:
        client.weights, client.version = self._trainer.weights, version

    async def finish(self, version: str) -> None:
        return


class StandInRollout:
    """The rollout workers' side: the gate, the engines in use, and stages as functions."""

    def __init__(self) -> None:
        self.is_open = False
        self.urls: list[str] = []
        self.down: dict[str, str] = {}
        self.epoch = -1
        self.stages: dict[str, Callable[..., Any]] = {}

    async def fence(self, epoch: int) -> None:
        self.epoch = epoch

    async def open(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    async def set_engines(self, urls: list[str]) -> None:
        self.urls, self.down = list(urls), {}

    async def engines_down(self) -> dict[str, str]:
        return dict(self.down)

    async def sample(self, epoch: int, segment: int) -> Ref:
        return await self.stages["sample"](epoch, segment)

    async def generate(self, epoch: int, segment: int) -> Ref:
        return await self.stages["generate"](epoch, segment)

    async def evaluate(self, epoch: int, job: Any) -> Ref:
        return await self.stages["evaluate"](epoch, job)


class Lab:
    """A run in a folder; `start` is a new process at it, with fresh stand-ins."""

    def __init__(self, folder: Path, engines: int = 1, **overrides: Any) -> None:
        self.folder, self._size = folder, engines
        self.overrides = {
            "num_rollout": 100, "rollout_batch_size": GROUPS, "n_samples_per_prompt": 4,
            "store_fsync": False, "lease_ttl_s": 5, **overrides,
        }  # fmt: skip
        self.backend = open_backend(str(folder / "store" / "r"))

    def start(self) -> RunContext:
        """What a session hands to the stages."""
        config = load_config(copy.deepcopy(SMALL), self.overrides)
        trainer, rollout = StandInTrainer(config), StandInRollout()
        serial = iter(range(1000))

        def spawn(index: int) -> Any:
            engine = StandInEngine(index, next(serial))
            return engine, engine

        tolerance = config.fault_tolerance
        limits = PoolLimits(1.0, tolerance.engine_restarts, HealthRules(0.005, 1.0, 3))
        pool = EnginePool(spawn, self._size, limits)
        pool.start()
        transport: Any = StandInTransport(trainer)
        paths = RunPaths.create(self.folder, "r")
        return RunContext(
            config=config,
            run_id="r",
            paths=paths,
            backend=self.backend,
            lease=Lease.acquire(self.backend, ttl_s=config.store.lease_ttl_s, take_over=True),
            cache=NodeCache(self.backend),
            trainer=trainer,  # type: ignore[arg-type]
            rollout=rollout,  # type: ignore[arg-type]
            engines=pool,
            weight_sync=WeightSync(rollout, transport, tolerance.sync_timeout_s, 1e-9),
            outbox=Outbox(paths.local, self.backend),
            start_state=initial_state(INITIAL),
            model={"vocab_size": 100, "max_positions": 256, "dtype": "float32"},
        )


def end(ctx: RunContext) -> None:
    """The process ends cleanly."""
    ctx.outbox.close("FINISHED", 5.0)
    ctx.lease.release()


def packed(ctx: RunContext, k: int) -> Ref:
    """Puts a whole iteration up to its batch into the store; returns the batch."""
    backend, groups = ctx.backend, range(k * GROUPS, (k + 1) * GROUPS)
    log_draws(backend, k, [draw(group, k) for group in groups])
    write_groups(backend, k, [group_rows(group) for group in groups], ctx.lease.epoch)
    seal = seal_segment(backend, k, "", ctx.lease.epoch)
    return put_batch(backend, ctx.lease, batch_content(k, seal)).ref()
