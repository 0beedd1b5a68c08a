"""The trainer's ranks as Ray actors, addressed as one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime_core.cluster.calls import answer
from slime_core.cluster.place import Place
from slime_core.cluster.spawner import Spawner
from slime_core.cluster.train_call import TrainCall
from slime_core.errors import TrainerError
from slime_core.run import faults
from slime_core.run.logs import log_to_file, print_to_file
from slime_core.store.source import BatchSource

if TYPE_CHECKING:
    from slime_core.config.tree import RunConfig
    from slime_core.megatron.rank import TrainerRank
    from slime_core.megatron.settings import TrainerSettings

log = logging.getLogger(__name__)
CONTROL_TIMEOUT_S = 30.0
OPTIONS: dict[str, Any] = {
    "num_cpus": 0.0,
    "max_restarts": 0,
    "concurrency_groups": {"control": 2},
}


class TrainerActor:
    """One trainer rank in a process of its own. Status answers while training runs."""

    def __init__(
        self,
        settings: TrainerSettings,
        source: BatchSource,
        log_file: Path,
        place: Place | None = None,
    ) -> None:
        """
        Args:
            place: what the process has to take over where it is no child of the run's own.
        """
        if place is not None:
            place.take()
        log_to_file(log_file, "INFO")
        print_to_file(log_file.with_suffix(".out"))
        self._settings = settings
        self._source = source
        self._rank: TrainerRank | None = None
        self._shared: list[Any] = []  # memory that engines read while a sync runs

    def setup(self) -> dict[str, Any]:
        """Builds the model; returns the initial weights' digest and the parameter count."""
        from slime_core.megatron.rank import TrainerRank  # imports torch and megatron

        start_s = time.monotonic()
        self._rank = TrainerRank(self._settings)
        built = self._rank.setup()
        log.info(
            "rank %d of %d is built on %s in %s: %d parameters, %.1f s",
            self._settings.rank, self._settings.world_size, self._settings.device,
            self._settings.dtype, built["parameters"], time.monotonic() - start_s,
        )  # fmt: skip
        return built

    def train(self, call: TrainCall) -> dict[str, Any]:
        """Reads the batch from the store and trains it."""
        document, batch = self._source.load(call.iteration)
        if document.digest != call.batch_digest:
            raise TrainerError(
                f"batch.json of iteration {call.iteration} has digest {document.digest}, "
                f"expected {call.batch_digest}"
            )
        start_s = time.monotonic()
        result = self._built().train(
            epoch=call.epoch,
            expect=call.expect,
            next_state=call.next_state,
            batch_digest=call.batch_digest,
            batch=batch,
            seed=call.seed,
            forced_skips=call.forced_skips,
            before_step=lambda step: faults.hold("train-middle", call.iteration),
        )
        log.info(
            "iteration %d: %d samples, loss of each step %s, %.2f s",
            call.iteration, len(batch.rewards), [step.get("loss") for step in result["steps"]],
            time.monotonic() - start_s,
        )  # fmt: skip
        return result

    def invoke(self, method: str, *args: Any) -> Any:
        """Calls a method of the rank in the training thread."""
        return getattr(self._built(), method)(*args)

    def buckets(self, most_bytes: int) -> list[str]:
        """All weights as serialised buckets in shared memory, of at most this size each where a
        tensor is not larger. The memory stays until `release_buckets` or the next call: with
        several engines torch's own count of readers would free it after the first."""
        from slime_core.engines.tensor_wire import cut_buckets

        self.release_buckets()
        tensors = self._built().named_hf_tensors()
        if self._settings.rank:
            for _ in tensors:  # all ranks gather, rank 0 sends
                pass
            return []
        self._shared = list(cut_buckets(tensors, most_bytes))
        return [bucket.wire() for bucket in self._shared]

    def release_buckets(self) -> None:
        """Frees the memory of the last buckets."""
        self._shared = []

    @ray.method(concurrency_group="control")
    def control(self, method: str, *args: Any) -> Any:
        """Calls what never blocks, such as status, beside a running train call."""
        return getattr(self._built(), method)(*args)

    def _built(self) -> TrainerRank:
        if self._rank is None:
            raise TrainerError(f"trainer rank {self._settings.rank} was used before its setup")
        return self._rank


class TrainerGroup:
    """All ranks. An exception in any of them taints the group: end it, rebuild, replay.

    Args:
        spawner: makes their processes.
        config: the run's.
        settings_of: (configuration, rank, number of the build) -> the rank's settings; called again
            for each build, so that a rebuilt group meets on a new port.
        world_size: ranks.
        source: how ranks read batches.
        logs: folder of their log files.
        start_timeout_s: deadline for building all ranks.
        train_timeout_s: deadline of one iteration's training.
    """

    def __init__(
        self,
        spawner: Spawner,
        config: RunConfig,
        settings_of: Callable[[RunConfig, int, int], TrainerSettings],
        world_size: int,
        source: BatchSource,
        logs: Path,
        start_timeout_s: float,
        train_timeout_s: float,
    ) -> None:
        self._spawner = spawner
        self._config = config
        self._settings_of = settings_of
        self._world_size = world_size
        self._source = source
        self._logs = logs
        self._start_timeout_s = start_timeout_s
        self._train_timeout_s = train_timeout_s
        self._actors: list[Any] = []
        self._setups: list[Any] = []
        self._builds = 0

    def start(self, config: RunConfig | None = None) -> None:
        """Creates the ranks and lets them build, without waiting."""
        self._builds += 1
        given = config or self._config
        ranks = range(self._world_size)
        settings = [self._settings_of(given, rank, self._builds) for rank in ranks]
        self._actors = [
            self._spawner.spawn(
                f"trainer-{one.rank}",
                TrainerActor,
                OPTIONS,
                one,
                self._source,
                self._logs / f"trainer-{one.rank}.log",
            )
            for one in settings
        ]
        self._setups = [actor.setup.remote() for actor in self._actors]

    async def ready(self) -> dict[str, Any]:
        """Waits for the builds; returns the setup result that all ranks gave.

        Raises:
            TrainerError: a rank was not built, or they hold different weights.
        """
        results = await answer(
            "the trainer to be built", self._start_timeout_s, self._setups, TrainerError
        )
        if any(result != results[0] for result in results):
            raise TrainerError(f"trainer ranks loaded different weights: {results}")
        return results[0]

    async def rebuild(self, config: RunConfig | None = None) -> dict[str, Any]:
        """Ends all ranks and builds new ones at the initial weights.

        Args:
            config: numeric values other than the run's present ones, for a replay.
        """
        self.close()
        self.start(config)
        return await self.ready()

    async def fence(self, epoch: int) -> None:
        """Every rank refuses lower epochs from now on."""
        await self._control("fence", epoch)

    async def status(self) -> dict[str, Any]:
        """The state that all ranks agree on.

        Raises:
            TrainerError: ranks differ, are tainted or do not answer; the group must be rebuilt.
        """
        states = await self._control("status")
        if any(state["tainted"] for state in states):
            raise TrainerError("the trainer is tainted by an earlier error")
        if len({(state["epoch"], state["state"]) for state in states}) > 1:
            raise TrainerError(f"trainer ranks disagree: {states}")
        return states[0]

    async def result_of(self, state: str) -> dict[str, Any] | None:
        """The kept result of the iteration that led to `state`, if the ranks have it."""
        return (await self._control("result_of", state))[0]

    async def train(self, call: TrainCall) -> dict[str, Any]:
        """Trains one iteration on all ranks; returns rank 0's result."""
        pending = [actor.train.remote(call) for actor in self._actors]
        name = f"training of iteration {call.iteration}"
        return (await answer(name, self._train_timeout_s, pending, TrainerError))[0]

    async def invoke(self, method: str, *args: Any) -> Any:
        """Calls a method on all ranks; returns rank 0's answer."""
        pending = [actor.invoke.remote(method, *args) for actor in self._actors]
        name = f"the trainer's {method}"
        return (await answer(name, self._train_timeout_s, pending, TrainerError))[0]

    @property
    def builds(self) -> int:
        """How often the ranks were built."""
        return self._builds

    async def save_written(self) -> bool:
        """Whether all ranks have written their files of the checkpoint in the making."""
        return all(await self._control("save_written"))

    async def buckets(self, most_bytes: int) -> list[str]:
        """All weights as serialised buckets, made by rank 0."""
        pending = [actor.buckets.remote(most_bytes) for actor in self._actors]
        name = "the trainer to make weight buckets"
        return (await answer(name, self._train_timeout_s, pending, TrainerError))[0]

    async def release_buckets(self) -> None:
        """Frees the buckets' memory, once every engine has answered."""
        pending = [actor.release_buckets.remote() for actor in self._actors]
        name = "the trainer to free its weight buckets"
        await answer(name, self._train_timeout_s, pending, TrainerError)

    def close(self) -> None:
        """Ends all ranks."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors, self._setups = [], []

    async def _control(self, method: str, *args: Any) -> list[Any]:
        pending = [actor.control.remote(method, *args) for actor in self._actors]
        name = f"the trainer's {method}"
        return await answer(name, CONTROL_TIMEOUT_S, pending, TrainerError)
