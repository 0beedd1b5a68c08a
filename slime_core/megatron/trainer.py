"""The trainer proper: model, optimizer and what can be done with them.

Imports megatron, so the device layer must be installed first (rank.py does).
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel

from slime_core.algorithms.kl import KLCoefficient
from slime_core.algorithms.objective import Objective
from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.batching.overlong import fitting_rows
from slime_core.batching.types import TrainBatch
from slime_core.errors import ConfigError, DataError, TrainerError
from slime_core.megatron import parallel
from slime_core.megatron.arguments import resolve
from slime_core.megatron.checkpoint import load_checkpoint, stage_state
from slime_core.megatron.critic import as_metrics, build_critic
from slime_core.megatron.digest import digest_as_on_one_rank, weights_digest
from slime_core.megatron.engine_routes import share_of_engine
from slime_core.megatron.export import export_hf, named_hf_tensors
from slime_core.megatron.foreign import read_weights
from slime_core.megatron.model import build_model, select_trained
from slime_core.megatron.objective import objective_of
from slime_core.megatron.optimizer import build_train_state
from slime_core.megatron.passes import Passes
from slime_core.megatron.postprocess import Postprocessed, postprocess
from slime_core.megatron.probe import effective_samples, flat_gradient
from slime_core.megatron.roles import HeldWeights
from slime_core.megatron.saving import PendingSave, Stage
from slime_core.megatron.settings import TrainerSettings
from slime_core.megatron.signals import Columns, response_columns, weight_scales
from slime_core.megatron.step import LARGEST, Gradients, PolicySteps
from slime_core.plugins.trainer_hooks import load_trainer_hooks
from slime_core.weights.tables import bind, padded_vocab_size, read_shape

log = logging.getLogger(__name__)
CRITIC = "critic"  # a folder inside a checkpoint, as are roles that copy the policy
_SEED_BITS = 31  # Megatron adds small offsets and numpy takes 32 bits


def _kl_coefficient(algorithm: AlgorithmSettings) -> KLCoefficient:
    """Of the loss or of token rewards, whichever is used."""
    value = algorithm.kl_coef or algorithm.kl_loss_coef
    return KLCoefficient(value, algorithm.kl_target, algorithm.kl_horizon)


class PolicyTrainer:
    """One rank's model in training. All methods are collectives; call them on every rank alike."""

    def __init__(self, settings: TrainerSettings) -> None:
        """Joins the other ranks and loads the model.

        Raises:
            ConfigError: settings, options and model do not fit together.
            TrainerError: the other ranks did not come.
        """
        torch.set_num_threads(settings.threads)
        shape = read_shape(settings.hf_checkpoint)
        options = resolve(settings, shape)
        self.settings = options.settings
        self.settings.check()
        self.objective = objective_of(self.settings.algorithm)
        self.kl = _kl_coefficient(self.settings.algorithm)
        self.iterations = 0
        parallel.start(self.settings)
        try:
            algorithm = self.settings.algorithm
            self.hooks = load_trainer_hooks(algorithm, self.settings.args)
            self.hooks.started()
            chunks, self.shape = build_model(self.settings, shape, options)
            if self.settings.megatron_load is not None:
                read_weights(chunks, self.settings.megatron_load)
            select_trained(chunks, self.shape, self.settings)
            self.state = build_train_state(chunks, self.settings, options)
            passes = Passes(self.settings, self.shape, self.state, replays_routes=True)
            self.policy = PolicySteps(passes, self.hooks)
            self.reference = self._hold(algorithm.uses_reference, algorithm.ref_load)
            self.old_actor = self._hold(algorithm.keep_old_actor, None)
            self.teacher = self._hold(algorithm.use_opd, algorithm.opd_teacher_load)
            self.critic = None
            if algorithm.uses_critic:
                self.critic = build_critic(self.settings, shape, options)
        except BaseException:
            parallel.stop()
            raise

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, as a Hugging Face checkpoint counts them."""
        total = 0
        for entry in bind(self.shape):
            for size in entry.hf_shapes:
                total += int(torch.Size(size).numel())
        return total

    def policy_digest(self, *, trained: bool = False) -> str:
        """See digest.weights_digest."""
        return weights_digest(self.state.models, self.shape, trained=trained)

    def start_digest(self) -> str:
        """The policy's digest as one rank would give it: it names where a run begins, whatever the
        layout of its ranks."""
        if self.settings.model_parallel_size == 1 and not parallel.experts_apart():
            return self.policy_digest()
        rows = padded_vocab_size(
            self.shape.vocab_size, self.settings.make_vocab_size_divisible_by, 1
        )
        undivided = replace(self.shape, padded_vocab_size=rows)
        return digest_as_on_one_rank(self.state.models, self.shape, undivided)

    def weights_digest(self, *, trained: bool = False) -> str:
        """Digests of all that is trained: of the policy and, if there is one, of the critic."""
        own = self.policy_digest(trained=trained)
        if self.critic is None:
            return own
        passes = self.critic.passes
        critic = weights_digest(passes.state.models, passes.shape, "critic", trained=trained)
        return f"{own} {critic}"

    def agree(self, *parts: str) -> bool:
        """True if all ranks were given the same strings."""
        body = hashlib.sha256("\x1f".join(parts).encode()).digest()
        number = int.from_bytes(body[:8], "big") >> 1
        return parallel.everyone_agrees(number, self.policy.passes.device)

    def train(
        self,
        batch: TrainBatch,
        seed: int,
        forced_skips: Sequence[bool] | None = None,
        before_step: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """All optimizer steps of one iteration.

        Args:
            batch: what to train; `batch.steps` says in which steps.
            seed: of torch's and Megatron's random state.
            forced_skips: in a replay, which steps were skipped then; they are skipped again.
            before_step: called with the step's number when its gradients are ready and the
                weights have not changed yet.

        Returns:
            {"steps": [one dict a step], "seconds": {"log_probs": s, "steps": s}}, and where there
            are any "hooks": the digest of each function of the user's that took part, and
            "postprocessed": of what one of them made of the batch.
        """
        batch, overlong = self._fitting(batch)
        if forced_skips is not None and len(forced_skips) != len(batch.steps):
            raise ConfigError(
                f"{len(forced_skips)} recorded skips for a batch of {len(batch.steps)} steps"
            )
        self._seed(seed)
        started = time.perf_counter()
        data = self._prepared(batch, seed)
        read = time.perf_counter()
        results = []
        for number, rows in enumerate(batch.steps):
            allowed = not (forced_skips and forced_skips[number])
            hook = None if before_step is None else partial(before_step, number)
            self.hooks.begins_step(self.iterations, number, self.state)
            result = self._step(data.batch, rows, data.columns, allowed, hook)
            counts = overlong | data.counts(rows) | self._routed(data.batch, rows)
            results.append(result | counts | {"weights_digest": self.weights_digest(trained=True)})
        self._end_iteration(results, batch.num_rows)
        seconds = {"log_probs": read - started, "steps": time.perf_counter() - read}
        told = {"hooks": self.hooks.digests, "postprocessed": data.digest}
        return {"steps": results, "seconds": seconds} | {k: v for k, v in told.items() if v}

    def probe(self, batch: TrainBatch, seed: int) -> dict[str, Any]:
        """The policy's gradient of a whole batch as one step, which is not taken.

        Only where one rank holds the model.

        Returns:
            {"loss", "grad_norm", "gradient": float32 [parameters], "effective_samples": how many
            samples of equal weight would carry as much: (sum w)^2 / sum w^2, w the sum over a
            sample's trained tokens of the loss's weight times |advantage|}.

        Raises:
            TrainerError: there are several ranks.
        """
        if self.settings.world_size > 1:
            raise TrainerError("a gradient can be looked at only where one rank holds the model")
        batch, _ = self._fitting(batch)
        rows = sorted(row for step in batch.steps for row in step)
        whole = replace(batch, steps=(tuple(rows),))
        self._seed(seed)
        data = self._prepared(whole, seed)
        gradients = self.policy.gradients(self._objective, data.batch, rows, data.columns)
        return {
            "loss": gradients.metrics["loss"],
            "grad_norm": gradients.grad_norm,
            "gradient": flat_gradient(self.state),
            "effective_samples": effective_samples(self.objective, data.batch, data.columns),
        }

    def _seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed & ((1 << _SEED_BITS) - 1))

    def _prepared(self, batch: TrainBatch, seed: int) -> Postprocessed:
        """The batch with its columns, as the user's function leaves them."""
        self.policy.passes.take_engine_routes(batch)
        algorithm = replace(self.settings.algorithm, kl_coef=self._in_rewards)
        columns = response_columns(
            algorithm,
            batch,
            self.policy,
            self.reference,
            self.teacher,
            self.critic,
            self.hooks,
            self.old_actor,
        )
        data = Postprocessed(batch, columns)
        limit_s = self.settings.collective_timeout_s / 2
        data = postprocess(self.hooks, algorithm, data, self.iterations, seed, limit_s)
        if data.changed and algorithm.tis_batch_normalize:
            data.columns["weight_scale"] = weight_scales(algorithm, data.batch, data.columns)
        return data

    def _routed(self, batch: TrainBatch, rows: Sequence[int]) -> dict[str, float]:
        """The share of a step's tokens that go where the engine sent them, if they are to."""
        wanted = self.settings.algorithm.use_rollout_routing_replay
        return {"engine_routes": share_of_engine(batch, rows)} if wanted else {}

    @property
    def _objective(self) -> Objective:
        """With the present coefficient of the KL."""
        if not self.objective.kl_loss_coef:
            return self.objective
        return replace(self.objective, kl_loss_coef=self.kl.value)

    def _fitting(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        """See fitting_rows."""
        settings = self.settings
        return fitting_rows(batch, settings.max_tokens_per_gpu, settings.overlong_policy)

    def _step(
        self,
        batch: TrainBatch,
        rows: Sequence[int],
        columns: Columns,
        allowed: bool,
        before_update: Callable[[], None] | None,
    ) -> dict[str, Any]:
        """One optimizer step of all roles, taken by all or by none."""
        parts: list[Gradients] = []
        found: dict[str, Any] = {}
        if self.critic is not None:
            parts.append(self.critic.gradients(batch, rows, columns))
            found |= as_metrics(parts[-1])
        warming_up = self.iterations < self.settings.algorithm.num_critic_only_steps
        if not (self.critic is not None and warming_up):
            parts.append(self.policy.gradients(self._objective, batch, rows, columns))
            found |= parts[-1].metrics
            if self.settings.algorithm.true_on_policy_mode:
                self._require_on_policy(parts[-1].metrics)
        if self.reference is not None:
            found["kl_coef"] = self.kl.value
        if before_update is not None:
            before_update()
        stepped = allowed and all(part.finite for part in parts)
        if stepped:
            for part in parts:
                part.take()
        last = parts[-1]
        return {
            "loss": last.metrics["loss"],
            **found,
            "grad_norm": last.grad_norm,
            "lr": last.lr,
            "skipped": not stepped,
            "tokens": last.tokens,
            "micro_batches": sum(part.micro_batches for part in parts),
            "non_finite_rows": sorted({row for part in parts for row in part.non_finite_rows}),
        }

    def _require_on_policy(self, metrics: dict[str, float]) -> None:
        """Raises DataError where the engine's log-probs are not those of the present weights."""
        gap, allowed = metrics.get(LARGEST, math.nan), self.settings.on_policy_tolerance
        if not gap <= allowed:
            raise DataError(
                f"true_on_policy_mode: log-probs of the trainer and of the engine differ by up to "
                f"{gap:.3g} nats, and {allowed:.3g} are allowed (canary_tolerance): the samples "
                "were generated by another policy than the one they would train, or by another "
                "arithmetic; look at train_rollout_logprob_abs_diff_max without this mode"
            )

    def _hold(self, wanted: bool, checkpoint: str | None) -> HeldWeights | None:
        """Weights of another role, if there is one; without a folder of its own, those that the
        actor begins with."""
        if not wanted:
            return None
        held = HeldWeights(self.state.models, self.shape)
        begun_with = self.settings.megatron_load or self.settings.hf_checkpoint
        if checkpoint not in (None, begun_with):
            held.read(checkpoint)
        return held

    @property
    def _in_rewards(self) -> float:
        """The coefficient of the KL in token rewards."""
        return self.kl.value if self.settings.algorithm.kl_coef else 0.0

    def _end_iteration(self, steps: Sequence[dict[str, Any]], samples: int) -> None:
        self.iterations += 1
        self.policy.passes.forget_routes()
        name = "rollout/kl" if self._in_rewards else "kl_loss"
        found = [step[name] for step in steps if name in step and not step["skipped"]]
        if found:
            self.kl = self.kl.after(sum(found) / len(found), samples)
        for role, interval in self.settings.algorithm.copies_of_policy.items():
            if self.iterations % interval == 0:
                self._copies[role].copy_actor()

    def canary(self, tokens: Sequence[int]) -> list[float]:
        """log p of tokens[1:] at temperature 1."""
        return self.policy.sequence_log_probs(tokens)

    def export_hf(self, directory: str, version: str) -> dict[str, Any]:
        """See export.export_hf."""
        return export_hf(self.state.models, self.shape, self.settings, directory, version)

    def named_hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See export.named_hf_tensors."""
        return named_hf_tensors(self.state.models, self.shape)

    def begin_save(self, directory: str, extra: dict[str, Any], *, beside: bool) -> PendingSave:
        """Stages a checkpoint of all that is trained.

        Args:
            extra: plain values that `load` returns.
            beside: its files are written in a thread while training goes on.
        """
        parts: dict[str, Stage] = {role: held.stage for role, held in self._copies.items()}
        if self.critic is not None:
            parts[CRITIC] = partial(stage_state, self.critic.passes.state)
        own = {**extra, "iterations": self.iterations, "kl_coef": self.kl.value}
        stage = partial(stage_state, self.state, extra=own)
        return PendingSave(directory, stage, parts, beside=beside)

    def finish_save(self, pending: PendingSave) -> None:
        """Makes a staged checkpoint final."""
        pending.finish(self.settings.collective_timeout_s)

    def load(self, directory: str) -> dict[str, Any]:
        """Restores a checkpoint; returns the extra values saved with it.

        A role that the settings have gained since begins as in a new run, from the iteration on
        in which they changed.

        Raises:
            TrainerError: no checkpoint there, or it does not fit.
        """
        folder = Path(directory)
        extra = load_checkpoint(self.state, folder)
        for role, held in self._copies.items():
            if self._has(folder, role):
                held.load(folder / role)
            elif role == "old_actor":  # its beginning is the policy, not what training began with
                held.copy_actor()
        if self.critic is not None and self._has(folder, CRITIC):
            load_checkpoint(self.critic.passes.state, folder / CRITIC)
        self.iterations = extra["iterations"]
        if self.kl.target is not None and extra["kl_coef"] > 0:
            self.kl = replace(self.kl, value=extra["kl_coef"])
        return extra

    @staticmethod
    def _has(folder: Path, role: str) -> bool:
        if (folder / role).is_dir():
            return True
        log.warning("checkpoint %s has no %s: it begins anew", folder.name, role)
        return False

    @property
    def _copies(self) -> dict[str, HeldWeights]:
        """Roles that change with the policy. The others are read again at every start."""
        held = {"reference": self.reference, "old_actor": self.old_actor}
        found = {role: held[role] for role in self.settings.algorithm.copies_of_policy}
        return {role: weights for role, weights in found.items() if weights is not None}

    def close(self) -> None:
        """Leaves the process groups."""
        parallel.stop()
