"""Training past iterations again on what the store holds, and comparing.

Nothing is written to the run. The trainer is one that is thrown away afterwards.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from slime_core.config.fields import numeric_digest
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError, DigestError, StoreError
from slime_core.run.context import FIRST_LINEAGE
from slime_core.run.drift import hooks_hint
from slime_core.seeds import derive_seed
from slime_core.stages.regroup import regrouped
from slime_core.store.batch import Batch, read_batch
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
    def export_hf(self, directory: str, version: str) -> dict[str, Any]: ...
    def train(
        self, epoch: int, expect: str, next_state: str, batch_digest: str, batch: Any, seed: int,
        forced_skips: Sequence[bool] | None = None,
    ) -> dict[str, Any]: ...  # fmt: skip
    def probe(self, batch: Any, seed: int) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Compared:
    """One iteration as it was trained and as it is trained now.

    Attributes:
        same: the weights afterwards are equal to the bit.
        loss, grad_norm: means over the steps, then; `_now` in the replay.
        hint: functions of the user's that may be the reason where it is not the same, in brackets.
    """

    iteration: int
    same: bool
    loss: float
    loss_now: float
    grad_norm: float
    grad_norm_now: float
    hint: str = ""

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        del found["hint"]
        return found


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
        scorer: digest of a grader whose overlay takes the place of the stored rewards.
    """

    def __init__(
        self,
        cache: NodeCache,
        build: Callable[[RunConfig], Rank],
        config_of: ConfigOf,
        scratch: Path,
        scorer: str | None = None,
    ) -> None:
        self.chain = trained_chain(cache)
        self._cache = cache
        self._build = build
        self._config_of = config_of
        self._scratch = scratch
        self._scorer = scorer
        self._state = ""

    def run(self, iterations: range, changed: ConfigOf | None = None) -> Iterator[Compared]:
        """Trains iterations again as `results` does, and compares each with its ledger."""
        for k, result in self.results(iterations, changed):
            yield _compared(k, self.chain[k].result, result)

    def results(
        self, iterations: range, changed: ConfigOf | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Brings a trainer to the state before the first iteration, then trains each and gives
        what came of it.

        Args:
            iterations: which; without gaps.
            changed: the configuration to train these with instead; what comes before is trained
                as it was.

        Raises:
            ConfigError: iterations that are not trained yet.
            DigestError: what they need is gone or damaged.
        """
        self._require(iterations)
        given = changed or self._config_of
        with self._trainer_before(iterations.start, given(self.chain[iterations.start])):
            for k in iterations:
                self._use(given(self.chain[k]))
                yield k, self._train(k, self._content(k))

    def probe(self, k: int, variants: dict[str, ConfigOf]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Gradients of batch k with the weights before iteration k; no weight changes.

        Args:
            variants: name -> the configuration that decides about rewards, advantages and loss.

        Returns:
            (name, what TrainerRank.probe gives) for each.

        Raises:
            ConfigError: the iteration is not trained yet, or its rewards cannot be made again.
            DigestError: what it needs is gone or damaged.
        """
        self._require(range(k, k + 1))
        with self._trainer_before(k, self._config_of(self.chain[k])):
            for name, config_of in variants.items():
                self._use(config_of(self.chain[k]))
                batch = load_train_batch(self._cache.backend, self._content(k), self._cache)
                yield name, self._rank.probe(batch, derive_seed(self._config.run.seed, "train", k))

    def _require(self, iterations: range) -> None:
        if not iterations or iterations.stop > len(self.chain):
            raise ConfigError(
                f"iterations {iterations.start}:{iterations.stop} cannot be trained again: the "
                f"run has 0:{len(self.chain)}"
            )

    @contextmanager
    def _trainer_before(self, k: int, config: RunConfig, honest: bool = False) -> Iterator[None]:
        """A trainer with the state before iteration k and a configuration, ended afterwards.

        Args:
            honest: what is trained on the way there must give the weights that the run had.

        Raises:
            DigestError: it does not, or what it needs is gone.
        """
        checkpoint = self._checkpoint_before(k)
        first = 0 if checkpoint is None else checkpoint.iteration + 1
        self._config = self._config_of(self.chain[first]) if first < k else config
        self._rank = self._build(self._config)
        try:
            self._begin(checkpoint, self._rank.setup()["weights_digest"])
            for i in range(first, k):
                self._use(self._config_of(self.chain[i]))
                found = _compared(i, self.chain[i].result, self._train(i, self._stored(i)))
                if honest and not found.same:
                    raise DigestError(
                        f"iteration {i}, trained again from the store, gives other weights than "
                        f"the run had{found.hint}: choose a version that a checkpoint holds"
                    )
            self._use(config)
            yield
        finally:
            self._rank.close()

    def export(self, iterations: int, folder: Path) -> str:
        """Writes the weights after so many iterations as a Hugging Face folder.

        Returns:
            Their weight version.

        Raises:
            ConfigError: the run has not trained so many.
            DigestError: what they need is gone, or training again gives other weights.
        """
        if not self.chain or not 0 <= iterations <= len(self.chain):
            raise ConfigError(f"there are no weights after {iterations} iterations: the run has "
                              f"trained {len(self.chain)}")  # fmt: skip
        last = self._config_of(self.chain[max(0, iterations - 1)])
        with self._trainer_before(iterations, last, honest=True):
            version = self.version(iterations)
            self._rank.export_hf(str(folder), version)
        return version

    def version(self, iterations: int) -> str:
        """The version under which the weights after so many iterations were served."""
        return self.chain[iterations - 1].weight_version if iterations else f"{FIRST_LINEAGE}-0"

    def _begin(self, checkpoint: Checkpoint | None, weights_digest: str) -> None:
        """Loads a checkpoint, or checks that the initial weights are those of the run."""
        if checkpoint is not None:
            loaded = self._rank.load(str(fetch_checkpoint(self._cache, checkpoint)))
            if loaded["state"] != checkpoint.state:
                raise DigestError(f"{checkpoint.key} holds another state than its manifest says")
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

    def _stored(self, k: int) -> Batch:
        batch = read_batch(self._cache.backend, k)
        if batch is None:
            raise StoreError(f"iteration {k} has no batch any more")
        return batch

    def _content(self, k: int) -> Batch:
        """Batch k with the rewards that the present configuration, or another grader, makes."""
        batch, recorded = self._stored(k), self._config_of(self.chain[k])
        if self._scorer is None and _about_rewards(recorded) == _about_rewards(self._config):
            return batch
        content = regrouped(self._cache, batch.content, self._config, self._scorer)
        return replace(batch, content=content)

    def _train(self, k: int, batch: Batch) -> dict[str, Any]:
        following = next_state(self._state, batch.digest, numeric_digest(self._config))
        result = self._rank.train(
            0, self._state, following, batch.digest,
            load_train_batch(self._cache.backend, batch, self._cache),
            derive_seed(self._config.run.seed, "train", k),
            self.chain[k].forced_skips,
        )  # fmt: skip
        self._state = following
        return result


def _about_rewards(config: RunConfig) -> tuple[Any, ...]:
    """What decides which rewards a batch names."""
    algorithm = config.algorithm
    return (
        algorithm.advantage_estimator,
        algorithm.disable_rewards_normalization,
        algorithm.disable_grpo_std_normalization,
        config.rewards,
        config.rollout.rollout_max_response_len,
    )


def _compared(k: int, before: dict[str, Any], after: dict[str, Any]) -> Compared:
    then, now = before["steps"], after["steps"]
    same = [step["weights_digest"] for step in now] == [step["weights_digest"] for step in then]
    return Compared(
        k, same,
        _mean(then, "loss"), _mean(now, "loss"),
        _mean(then, "grad_norm"), _mean(now, "grad_norm"),
        "" if same else hooks_hint(before, after),
    )  # fmt: skip


def _mean(steps: list[dict[str, Any]], name: str) -> float:
    values = [float(step[name]) for step in steps if not step.get("skipped") and name in step]
    return sum(values) / len(values) if values else float("nan")
