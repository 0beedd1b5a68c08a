"""One trainer rank: fences, states and kept results around the trainer.

A plain class. Whoever holds it (a Ray actor) may call `status` and `fence` from another thread
while `train` runs. Nothing here imports megatron before the device layer is in place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slime_core.batching.types import TrainBatch
from slime_core.errors import StaleOwnerError, TrainerError
from slime_core.megatron.settings import TrainerSettings

if TYPE_CHECKING:
    import torch

    from slime_core.megatron.saving import PendingSave
    from slime_core.megatron.sleep import Sleep
    from slime_core.megatron.trainer import PolicyTrainer

log = logging.getLogger(__name__)
_KEPT_RESULTS = 4


class TrainerRank:
    """Trains a batch exactly once for whoever owns the run.

    A rank knows the highest epoch it has seen and refuses lower ones. Its `state` names what its
    weights have been trained on. An exception inside a call that touches weights taints the rank:
    what it holds is unknown, so it must be replaced.

    A rank may sleep between calls: its device's memory is free then. Whatever needs weights wakes
    it, so no caller can meet a trainer without them, and only who wants the memory has to know.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        build: Callable[[TrainerSettings], PolicyTrainer] | None = None,
    ) -> None:
        self.settings = settings
        self._build = build or build_trainer
        self._trainer: PolicyTrainer | None = None
        self._lock = threading.Lock()  # guards the fields below, never held for long
        self._running = threading.Lock()  # one call at a time
        self._epoch = 0
        self._state = ""
        self._call: str | None = None
        self._batch_digest: str | None = None
        self._taint: str | None = None
        self._results: dict[str, dict[str, Any]] = {}
        self._pending: PendingSave | None = None
        self._sleep: Sleep | None = None

    def setup(self) -> dict[str, Any]:
        """Joins the other ranks and loads the model.

        Returns:
            {"weights_digest": of the policy's initial weights, "parameters": their number}. It
            names where the run begins, and so it is the same whatever other roles there are, and
            however many ranks.

        Raises:
            ConfigError: settings and model do not fit together.
            TrainerError: the process cannot train, or the other ranks did not come.
        """
        with self._exclusive("setup", changes_weights=True):
            if self._trainer is not None:
                raise TrainerError("setup was called twice")
            self._trainer = self._build(self.settings)
            return {
                "weights_digest": self._trainer.start_digest(),
                "parameters": self._trainer.num_parameters,
            }

    def fence(self, epoch: int) -> int:
        """Makes `epoch` the owner; returns it.

        Raises:
            StaleOwnerError: a higher epoch owns this rank.
        """
        with self._lock:
            self._check_epoch(epoch)
            self._epoch = epoch
            return epoch

    def status(self) -> dict[str, Any]:
        """{"epoch", "state", "busy", "call", "batch_digest", "asleep", "tainted", "reason"}; never
        blocks.

        `call` and `batch_digest` say what a busy rank does; `reason` why it is tainted.
        """
        with self._lock:
            return {
                "epoch": self._epoch,
                "state": self._state,
                "busy": self._call is not None,
                "call": self._call,
                "batch_digest": self._batch_digest,
                "asleep": self._sleep is not None,
                "tainted": self._taint is not None,
                "reason": self._taint,
            }

    def set_state(self, state: str) -> None:
        """Names what the present weights have been trained on (after setup)."""
        with self._lock:
            if self._call is not None:
                raise TrainerError(f"the rank is busy with {self._call}; its state will change")
            self._state = state

    def result_of(self, state: str) -> dict[str, Any] | None:
        """The kept result of the training that led to `state`, if this rank did it recently."""
        with self._lock:
            kept = self._results.get(state)
            return None if kept is None else dict(kept)

    def train(
        self,
        epoch: int,
        expect: str,
        next_state: str,
        batch_digest: str,
        batch: TrainBatch,
        seed: int,
        forced_skips: Sequence[bool] | None = None,
        before_step: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """Trains one iteration, if the weights are in the expected state.

        Args:
            epoch: of the caller.
            expect: the state to start from.
            next_state: the state afterwards.
            batch_digest: digest of the batch's document.
            batch: the batch itself.
            seed: derived from the run's seed and the iteration.
            forced_skips: in a replay, which steps had been skipped.
            before_step: called with each step's number before its update; an exception in it
                taints like any other.

        Returns:
            {"state", "batch_digest", "steps": [...], "metrics": {...}, "seconds": {...}}. Also
            kept under the new state.

        Raises:
            StaleOwnerError: a higher epoch owns this rank.
            TrainerError: busy, tainted or in another state; or training failed, which taints.
        """
        with self._lock:
            self._check_epoch(epoch)
            self._epoch = epoch
        with self._exclusive("train", changes_weights=False, batch_digest=batch_digest):
            trainer = self._ready()
            agreed = trainer.agree(self._state, expect, next_state, batch_digest)
            if self._state != expect:
                raise TrainerError(
                    f"the trainer is in state {self._state[:12]!r}, the call expects "
                    f"{expect[:12]!r}: rebuild it from a checkpoint, or read the result it kept"
                )
            with self._tainting("train"):
                if not agreed:
                    raise TrainerError("trainer ranks were given different states or batches")
                outcome = trainer.train(batch, seed, forced_skips, before_step)
                digests = [step["weights_digest"] for step in outcome["steps"]]
                if not trainer.agree("done", *digests):
                    raise TrainerError("trainer ranks hold different weights after training")
            result = {
                "state": next_state,
                "batch_digest": batch_digest,
                "metrics": mean_metrics(outcome["steps"]),
                **outcome,
            }
            self._keep(next_state, result)
            return dict(result)

    def probe(self, batch: TrainBatch, seed: int) -> dict[str, Any]:
        """Loss and gradient of a batch with the present weights, which stay as they are.

        Returns:
            See PolicyTrainer.probe.
        """
        with self._exclusive("probe"):
            return self._ready().probe(batch, seed)

    def canary(self, tokens: Sequence[int]) -> list[float]:
        """log p of tokens[1:] with the present weights, at temperature 1, float32."""
        with self._exclusive("canary"):
            return self._ready().canary(tokens)

    def export_hf(self, directory: str, version: str) -> dict[str, Any]:
        """Writes the weights as a Hugging Face folder, complete or not at all.

        Returns:
            {"digest", "bytes", "tensors"}.
        """
        with self._exclusive("export_hf"):
            return self._ready().export_hf(directory, version)

    def named_hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights under their Hugging Face names. The rank is busy until the iterator ends."""
        with self._exclusive("named_hf_tensors"):
            yield from self._ready().named_hf_tensors()

    def save(self, directory: str) -> None:
        """Writes a checkpoint with this rank's state, complete or not at all.

        Raises:
            TrainerError: a rank cannot write; the same on all of them.
        """
        self.begin_save(directory, beside=False)
        self.finish_save()

    def begin_save(self, directory: str, *, beside: bool = True) -> None:
        """Stages a checkpoint of the present weights; then training may go on while a thread writes
        the files. `finish_save` makes it final.

        Raises:
            TrainerError: one is in the making, or the directory exists already.
        """
        with self._exclusive("save"):
            if self._pending is not None:
                raise TrainerError(f"the checkpoint {self._pending.target} is not finished yet")
            extra = {"state": self._state}
            self._pending = self._ready().begin_save(directory, extra, beside=beside)

    def save_written(self) -> bool:
        """Whether this rank has written its files of the checkpoint in the making; never blocks."""
        return self._pending is None or self._pending.written

    def finish_save(self) -> None:
        """Makes the checkpoint in the making final, once all ranks have written.

        Raises:
            TrainerError: there is none, or a rank could not write its files.
        """
        with self._exclusive("save"):
            pending, self._pending = self._pending, None
            if pending is None:
                raise TrainerError("no checkpoint is in the making")
            self._built().finish_save(pending)

    def load(self, directory: str) -> dict[str, Any]:
        """Restores a checkpoint that the caller has verified.

        Returns:
            {"state", "weights_digest"}.

        Raises:
            TrainerError: no checkpoint there, or it does not fit; the latter taints.
        """
        with self._exclusive("load", changes_weights=True):
            trainer = self._ready()
            extra = trainer.load(directory)
            with self._lock:
                self._state = extra["state"]
                self._results.clear()
            return {"state": extra["state"], "weights_digest": trainer.weights_digest()}

    def sleep(self) -> dict[str, int]:
        """Frees the device's memory of weights, gradients and optimizer states until the next call
        that needs them; they wait in host memory.

        Returns:
            {"kept_bytes", "dropped_bytes"}: what the host holds, and gradients.

        Raises:
            TrainerError: a checkpoint in the making still reads the weights.
        """
        with self._exclusive("sleep"):
            trainer = self._built()
            if self._pending is not None and self._pending.reads_weights:
                raise TrainerError(
                    f"the checkpoint {self._pending.target} still reads the weights: finish_save "
                    "comes before sleep"
                )
            if self._sleep is None:
                from slime_core.megatron.sleep import Sleep

                with self._tainting("sleep"):
                    self._sleep = Sleep(trainer)
                log.info(
                    "asleep: %d bytes wait in host memory, %d of gradients are dropped",
                    self._sleep.kept_bytes, self._sleep.dropped_bytes,
                )  # fmt: skip
            sizes = self._sleep.kept_bytes, self._sleep.dropped_bytes
            return dict(zip(("kept_bytes", "dropped_bytes"), sizes, strict=True))

    def wake(self) -> None:
        """Brings weights, gradients and optimizer states back to the device, if they are away.

        Raises:
            TrainerError: others have taken its memory meanwhile; this taints.
        """
        with self._exclusive("wake"):
            self._ready()

    def close(self) -> None:
        """Leaves the other ranks. The object is of no use afterwards."""
        with self._exclusive("close"):
            if self._trainer is not None:
                self._trainer.close()
                self._trainer = self._sleep = None

    def _keep(self, state: str, result: dict[str, Any]) -> None:
        with self._lock:
            self._state = state
            self._results[state] = result
            for old in list(self._results)[:-_KEPT_RESULTS]:
                del self._results[old]

    def _ready(self) -> PolicyTrainer:
        """The trainer, awake."""
        trainer = self._built()
        if self._sleep is not None:
            with self._tainting("wake"):
                self._sleep.end()
            self._sleep = None
        return trainer

    def _built(self) -> PolicyTrainer:
        if self._trainer is None:
            raise TrainerError("the trainer is not set up; call setup first")
        if self._taint is not None:
            raise TrainerError(f"the trainer is tainted and must be replaced: {self._taint}")
        return self._trainer

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise StaleOwnerError(
                f"epoch {epoch} called the trainer, but epoch {self._epoch} owns the run: "
                "this process must stop"
            )

    @contextmanager
    def _exclusive(
        self, call: str, changes_weights: bool = False, batch_digest: str | None = None
    ) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise TrainerError(f"{call} was called while the trainer is busy with {self._call}")
        try:
            with self._lock:
                self._call, self._batch_digest = call, batch_digest
            if changes_weights:
                with self._tainting(call):
                    yield
            else:
                yield
        finally:
            with self._lock:
                self._call = self._batch_digest = None
            self._running.release()

    @contextmanager
    def _tainting(self, call: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._taint = f"{call} failed: {type(error).__name__}: {error}"
            raise


def build_trainer(settings: TrainerSettings) -> PolicyTrainer:
    """Prepares this process for the device and builds the trainer in it."""
    from slime_core.megatron import device

    device.install(settings.device)
    from slime_core.megatron.trainer import PolicyTrainer

    return PolicyTrainer(settings)


def mean_metrics(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means of the steps' numbers over the steps that were taken; sums of counts; last lr."""
    taken = [step for step in steps if not step["skipped"]]
    found: dict[str, float] = {
        name: sum(step[name] for step in taken) / len(taken)
        for name, value in (taken[0] if taken else {}).items()
        if isinstance(value, float) and not name.endswith("_max")
    }
    for name in ("tokens", "micro_batches"):
        found[name] = sum(step[name] for step in steps)
    for name in {name for step in taken for name in step if name.endswith("_max")}:
        found[name] = max(step[name] for step in taken)
    if steps:
        found["lr"] = steps[-1]["lr"]
    found["skipped_steps"] = len(steps) - len(taken)
    return found
