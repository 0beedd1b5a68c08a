"""What stages work with: the run's configuration, store, owner mark and actor groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from slime_core.config.tree import RunConfig
from slime_core.run.paths import RunPaths

if TYPE_CHECKING:
    from slime_core.cluster.engine_pool import EnginePool
    from slime_core.cluster.rollout_group import RolloutGroup
    from slime_core.cluster.trainer_group import TrainerGroup
    from slime_core.run.checkpoints import SaveBeside
    from slime_core.run.epoch import Lease
    from slime_core.store.backend import Backend
    from slime_core.store.cache import NodeCache
    from slime_core.tracking.outbox import Outbox
    from slime_core.weights.sync.machine import WeightSync


FIRST_LINEAGE = "l0"


@dataclass
class StageClock:
    """Seconds of each stage of the current iterations; volatile, goes into `by` of documents."""

    seconds: dict[int, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def time(self, iteration: int, stage: str) -> Iterator[None]:
        """Adds the seconds of a block to a stage."""
        start = monotonic()
        try:
            yield
        finally:
            stages = self.seconds.setdefault(iteration, {})
            stages[stage] = stages.get(stage, 0.0) + monotonic() - start

    def of(self, iteration: int) -> dict[str, float]:
        """Seconds by stage so far; forgets iterations long past."""
        for old in [k for k in self.seconds if k < iteration - 8]:
            del self.seconds[old]
        return {name: round(value, 6) for name, value in self.seconds.get(iteration, {}).items()}


@dataclass
class TrainState:
    """Where the trainer stands.

    Attributes:
        digest: state digest S of what the trainer's ranks hold.
        iterations: iterations contained in the weights.
        lineage: names a stretch of training without drift; stands before the version number.
        trained_s: seconds of training that a resume would have to repeat, since they came after
            the last final checkpoint.
        drifts: how often a replay of this owner gave other weights than the ledger names.
    """

    digest: str
    iterations: int
    lineage: str
    trained_s: float = 0.0
    drifts: int = 0

    @property
    def version(self) -> str:
        """The weight version of what the ranks hold."""
        return f"{self.lineage}-{self.iterations}"


@dataclass
class RunContext:
    """Everything a stage may use; made by the session, bound by the parent flow.

    Attributes:
        backend: the store below the run's prefix.
        lease: proof of ownership; its guard runs before each commit.
        cache: parts near this process.
        start_state: S_-1, made from the digest of the initial weights.
        model: facts of the model (vocab_size, max_positions, dtype).
        facts: digests of tokenizer and data, row counts of the prompts.
        served: weight version that the engines serve, None before the first sync.
        canary: canary difference of the last sync.
        saving: a checkpoint whose files are being written while training goes on.
        owes_checkpoint: one could not be stored, so the next save is due at once.
    """

    config: RunConfig
    run_id: str
    paths: RunPaths
    backend: Backend
    lease: Lease
    cache: NodeCache
    trainer: TrainerGroup
    rollout: RolloutGroup
    engines: EnginePool
    weight_sync: WeightSync
    outbox: Outbox
    clock: StageClock = field(default_factory=StageClock)
    start_state: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    state: TrainState = field(default_factory=lambda: TrainState("", 0, FIRST_LINEAGE))
    served: str | None = None
    canary: float = 0.0
    saving: SaveBeside | None = None
    owes_checkpoint: bool = False

    def by(self, iteration: int) -> dict[str, Any]:
        """What a document of this iteration says beside its body: who wrote it, seconds."""
        return {
            "epoch": self.lease.epoch,
            "run_id": self.run_id,
            "seconds": self.clock.of(iteration),
        }
