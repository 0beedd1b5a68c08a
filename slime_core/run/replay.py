"""Training past iterations again on what the store holds, and comparing.

Nothing is written to the run. The trainer is one that is thrown away afterwards.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from slime_core.config.fields import numeric_digest
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError, DigestError, StoreError
from slime_core.seeds import derive_seed
from slime_core.store.batch import read_batch
from slime_core.store.cache import NodeCache
from slime_core.store.checkpoints import Checkpoint, fetch_checkpoint, list_checkpoints
from slime_core.store.ledger import (
    Ledger,
    initial_state,
    next_state,
    read_ledger,
    unbroken_chain,
)
from slime_core.store.load import load_train_batch


class Rank(Protocol):
    """What a replay needs of a trainer (megatron.rank.TrainerRank)."""

    def setup(self) -> dict[str, Any]: ...
    def set_state(self, state: str) -> None: ...
    def load(self, directory: str) -> dict[str, Any]: ...
    def save(self, directory: str) -> None: ...
    def train(
        self, epoch: int, expect: str, next_state: str, batch_digest: str, batch: Any, seed: int,
        forced_skips: Sequence[bool] | None = None,
    ) -> dict[str, Any]: ...  # fmt: skip
    def close(self) -> None: ...


@dataclass(frozen=True)
class Compared:
    """One iteration as it was trained and as it is trained now.

    Attributes:
        same: the weights afterwards are equal to the bit.
        loss, grad_norm: means over the steps, then; `_now` in the replay.
    """

    iteration: int
    same: bool
    loss: float
    loss_now: float
    grad_norm: float
    grad_norm_now: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def trained_chain(cache: NodeCache) -> list[Ledger]:
    """All ledgers of a run, each verified to follow from the one before."""
    first = read_ledger(cache.backend, 0)
    return [] if first is None else unbroken_chain(cache.backend, first.parent)


ConfigOf = Callable[[Ledger], RunConfig]


class Replay:
    """Trains iterations of a run again.

    Args:
        cache: the run; checkpoints are fetched to its folder.
        build: makes a trainer with a configuration, not yet set up.
        config_of: the configuration that an iteration was trained with.
        scratch: an empty folder for the weights between two configurations.
    """

    def __init__(
        self,
        cache: NodeCache,
        build: Callable[[RunConfig], Rank],
        config_of: ConfigOf,
        scratch: Path,
    ) -> None:
        self.chain = trained_chain(cache)
        self._cache = cache
        self._build = build
        self._config_of = config_of
        self._scratch = scratch
        self._state = ""

    def run(self, iterations: range, changed: ConfigOf | None = None) -> Iterator[Compared]:
        """Brings a trainer to the state before the first iteration, then trains each.

        Args:
            iterations: which; without gaps.
            changed: the configuration to train these with instead; what comes before is trained
                as it was.

        Raises:
            ConfigError: iterations that are not trained yet.
            DigestError: what they need is gone or damaged.
        """
        if not iterations or iterations.stop > len(self.chain):
            raise ConfigError(
                f"iterations {iterations.start}:{iterations.stop} cannot be trained again: the "
                f"run has 0:{len(self.chain)}"
            )
        checkpoint = self._checkpoint_before(iterations.start)
        first = 0 if checkpoint is None else checkpoint.iteration + 1
        self._config = self._config_for(first, iterations, changed)
        self._rank = self._build(self._config)
        try:
            self._begin(checkpoint, self._rank.setup()["weights_digest"])
            for k in range(first, iterations.stop):
                self._use(self._config_for(k, iterations, changed))
                result = self._train(k)
                if k in iterations:
                    yield _compared(k, self.chain[k].result["steps"], result["steps"])
        finally:
            self._rank.close()

    def _config_for(self, k: int, iterations: range, changed: ConfigOf | None) -> RunConfig:
        given = changed if changed is not None and k in iterations else self._config_of
        return given(self.chain[k])

    def _begin(self, checkpoint: Checkpoint | None, weights_digest: str) -> None:
        """Loads a checkpoint, or checks that the initial weights are those of the run."""
        if checkpoint is not None:
            self._rank.load(str(fetch_checkpoint(self._cache, checkpoint)))
            self._state = checkpoint.state
        else:
            self._state = initial_state(weights_digest)
            if self._state != self.chain[0].parent:
                raise DigestError(
                    f"{self._config.rollout.hf_checkpoint} does not hold the weights that the run "
                    "began with, and there is no checkpoint before these iterations"
                )
        self._rank.set_state(self._state)

    def _checkpoint_before(self, first: int) -> Checkpoint | None:
        for checkpoint in list_checkpoints(self._cache.backend):
            k = checkpoint.iteration
            if k < first and self.chain[k].state == checkpoint.state:
                return checkpoint
        return None

    def _use(self, config: RunConfig) -> None:
        """Goes on with a configuration, in a new trainer with the same weights and optimizer
        state where the present one has another."""
        if config == self._config:
            return
        folder = Path(tempfile.mkdtemp(dir=self._scratch)) / "weights"
        self._rank.save(str(folder))
        self._rank.close()
        self._config, self._rank = config, self._build(config)
        self._rank.setup()
        self._rank.load(str(folder))
        shutil.rmtree(folder)

    def _train(self, k: int) -> dict[str, Any]:
        batch = read_batch(self._cache.backend, k)
        if batch is None:
            raise StoreError(f"iteration {k} has no batch any more")
        following = next_state(self._state, batch.digest, numeric_digest(self._config))
        result = self._rank.train(
            0, self._state, following, batch.digest,
            load_train_batch(self._cache.backend, batch, self._cache),
            derive_seed(self._config.run.seed, "train", k),
            self.chain[k].forced_skips,
        )  # fmt: skip
        self._state = following
        return result


def _compared(k: int, then: list[dict[str, Any]], now: list[dict[str, Any]]) -> Compared:
    same = [step["weights_digest"] for step in now] == [step["weights_digest"] for step in then]
    return Compared(
        k, same,
        _mean(then, "loss"), _mean(now, "loss"),
        _mean(then, "grad_norm"), _mean(now, "grad_norm"),
    )  # fmt: skip


def _mean(steps: list[dict[str, Any]], name: str) -> float:
    values = [float(step[name]) for step in steps if not step.get("skipped") and name in step]
    return sum(values) / len(values) if values else float("nan")
