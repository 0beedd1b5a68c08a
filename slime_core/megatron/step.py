"""One optimizer step, and forward passes that only read log-probs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime_core.algorithms.objective import Objective, ObjectiveInputs, evaluate
from slime_core.batching.pack import PackedMicroBatch, pack
from slime_core.batching.schedule import SchedulePolicy, SequenceCost, schedule_step
from slime_core.batching.select import StepTotals, step_totals
from slime_core.batching.types import TrainBatch
from slime_core.megatron import parallel
from slime_core.megatron.attention import Pack
from slime_core.megatron.logprobs import log_probs_of_rows
from slime_core.megatron.model import PolicyModel
from slime_core.megatron.optimizer import TrainState, apply_gradients, zero_gradients
from slime_core.megatron.settings import TrainerSettings
from slime_core.weights.tables import ModelShape

_LARGEST = "train_rollout_logprob_abs_diff_max"


@dataclass(frozen=True)
class MicroBatch:
    """A pack on the device. P read positions of k rows.

    Attributes:
        tokens, positions: int64 [1, S].
        params: the sequences of the pack.
        index, targets, rows: int64 [P], see PackedMicroBatch.
        row_ids: rows of the batch.
        columns: what the loss needs at each position, [P] each; empty in a forward-only pass.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    params: Pack
    index: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor
    row_ids: tuple[int, ...]
    columns: dict[str, torch.Tensor]


class StepRunner:
    """Runs micro-batches through Megatron's schedule. Holds no state of its own."""

    def __init__(
        self,
        settings: TrainerSettings,
        shape: ModelShape,
        state: TrainState,
        objective: Objective,
    ) -> None:
        self.settings = settings
        self.shape = shape
        self.state = state
        self.objective = objective
        self.device = parallel.device_of(settings)
        self._schedule = get_forward_backward_func()
        self._pad_to = settings.tensor_model_parallel_size if settings.sequence_parallel else 1

    def train_step(
        self,
        batch: TrainBatch,
        rows: Sequence[int],
        old_log_probs: torch.Tensor | None,
        allowed: bool = True,
        before_update: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """One optimizer step over some rows of a batch. A collective.

        Args:
            batch: the whole batch of the iteration.
            rows: rows of this step, all ranks together.
            old_log_probs: float32 [sum R] over the batch's response tokens; None takes the
                current log-probs, detached.
            allowed: False computes everything but leaves the weights alone.
            before_update: called when gradients are ready and no weight has changed.

        Returns:
            loss, grad_norm, lr, skipped, micro_batches, tokens, non_finite_rows and the metrics.
        """
        totals = step_totals(rows, batch.rollout_ids, batch.mask_sums)
        packs = self._packs(batch, rows, self._policy(self.settings.max_tokens_per_gpu), "trained")
        micro_batches = [
            self._to_device(packed, self._columns(batch, packed, old_log_probs)) for packed in packs
        ]
        zero_gradients(self.state)
        lr = self.state.lr
        outputs = self._run(micro_batches, partial(self._loss, totals))
        metrics = self._metrics([report for _, report in outputs])
        if before_update is not None:
            before_update()
        stepped, grad_norm = apply_gradients(self.state, allowed and math.isfinite(metrics["loss"]))
        return {
            **metrics,
            "grad_norm": grad_norm,
            "lr": lr,
            "skipped": not stepped,
            "tokens": totals.tokens,
            "micro_batches": len(micro_batches),
            "non_finite_rows": self._non_finite_rows(metrics, outputs),
        }

    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, rows: Sequence[int]) -> torch.Tensor:
        """Log-probs of all trained response tokens of some rows, with the present weights.

        Runs in micro-batches of its own (log_probs_max_tokens_per_gpu). A collective.

        Returns:
            float32 [sum R] over the batch's response tokens, 0 where nothing was read. Valid on
            the last pipeline stage, which alone needs it.
        """
        cap = self.settings.log_probs_max_tokens_per_gpu or self.settings.max_tokens_per_gpu
        packs = self._packs(batch, rows, self._policy(cap), "trained")
        outputs = self._run([self._to_device(packed) for packed in packs], None)
        flat = torch.zeros(len(batch.loss_mask), dtype=torch.float32, device=self.device)
        for packed, values in zip(packs, outputs, strict=False):
            flat[torch.from_numpy(packed.response_index).to(self.device)] = values
        return parallel.sum_over_data_parallel(flat)

    @torch.no_grad()
    def sequence_log_probs(self, tokens: Sequence[int]) -> list[float]:
        """log p of tokens[1:] given what stands before each, at temperature 1. A collective."""
        n = len(tokens)
        padding = -n % self._pad_to
        ids = np.zeros(n + padding, dtype=np.int64)
        ids[:n] = tokens
        packed = PackedMicroBatch(
            tokens=ids,
            position_ids=np.concatenate([np.arange(n), np.arange(padding)]),
            cu_seqlens=np.array([0, n, n + padding][: 3 if padding else 2], dtype=np.int32),
            max_seqlen=max(n, padding),
            row_ids=(0,),
            logit_index=np.arange(n - 1),
            targets=ids[1:n],
            rows=np.zeros(n - 1, dtype=np.int64),
            response_index=np.arange(n - 1),
        )
        outputs = self._run([self._to_device(packed)], None, temperature=1.0)
        values = torch.zeros(n - 1, dtype=torch.float32, device=self.device)
        if outputs:
            values = outputs[0].contiguous()
        return parallel.from_last_stage(values).tolist()

    def _policy(self, max_tokens: int | None) -> SchedulePolicy:
        settings = self.settings
        cost = None
        if settings.data_parallel_size > 1:
            width = self.shape.num_heads * self.shape.head_dim
            size = sum(p.numel() for p in self.state.model.parameters())
            cost = SequenceCost.of_transformer(size, self.shape.num_layers, width)
        return SchedulePolicy(
            micro_batch_size=settings.micro_batch_size,
            max_tokens=max_tokens if settings.use_dynamic_batch_size else None,
            cost=cost,
        )

    def _packs(
        self, batch: TrainBatch, rows: Sequence[int], policy: SchedulePolicy, positions: Any
    ) -> list[PackedMicroBatch]:
        plan = schedule_step(batch.lengths.tolist(), rows, self.settings.data_parallel_size, policy)
        mine = plan.ranks[parallel_state.get_data_parallel_rank()]
        return [pack(batch, ids, pad_to=self._pad_to, positions=positions) for ids in mine]

    def _columns(
        self, batch: TrainBatch, packed: PackedMicroBatch, old: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """What the loss needs: [P] by token, [k] for denominators."""
        ids = np.asarray(packed.row_ids, dtype=np.int64)
        rewards = batch.rewards[ids][packed.rows]
        columns = {
            "advantages": torch.from_numpy(rewards.astype(np.float32)),
            "rollout": torch.from_numpy(batch.rollout_log_probs[packed.response_index]),
            "denominators": torch.from_numpy(batch.denominators[ids]),
        }
        columns = {name: column.to(self.device) for name, column in columns.items()}
        if old is not None:
            columns["old"] = old[torch.from_numpy(packed.response_index).to(self.device)]
        return columns

    def _to_device(
        self, packed: PackedMicroBatch, columns: dict[str, torch.Tensor] | None = None
    ) -> MicroBatch:
        def move(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        positions = move(packed.position_ids)
        return MicroBatch(
            tokens=move(packed.tokens)[None],
            positions=positions[None],
            params=self.state.model.pack(move(packed.cu_seqlens), positions, packed.max_seqlen),
            index=move(packed.logit_index),
            targets=move(packed.targets),
            rows=move(packed.rows),
            row_ids=packed.row_ids,
            columns=columns or {},
        )

    def _run(
        self, micro_batches: list[MicroBatch], loss: Any, temperature: float | None = None
    ) -> list[Any]:
        """Megatron's schedule over this rank's micro-batches; outputs on the last stage."""

        def forward(data: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
            micro = next(data)
            hidden = model(micro.tokens, micro.positions, None, packed_seq_params=micro.params)
            return hidden, partial(finish, micro)

        def finish(micro: MicroBatch, hidden: torch.Tensor, non_loss_data: bool = False) -> Any:
            log_probs, entropy = self._read(micro, hidden, temperature)
            if non_loss_data:
                return log_probs
            return loss(micro, log_probs, entropy)

        forward_only = loss is None
        return self._schedule(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=list[torch.nn.Module](self.state.chunks),
            num_microbatches=len(micro_batches),
            seq_length=max(micro.tokens.size(1) for micro in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _read(
        self, micro: MicroBatch, hidden: torch.Tensor, temperature: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model: PolicyModel = self.state.model
        return log_probs_of_rows(
            model,
            model.hidden_rows(hidden, micro.index),
            micro.targets,
            vocab_size=self.shape.vocab_size,
            temperature=temperature or self.settings.rollout_temperature,
            chunk_tokens=self.settings.logits_chunk_tokens,
        )

    def _loss(
        self,
        totals: StepTotals,
        micro: MicroBatch,
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[MicroBatch, dict[str, torch.Tensor]]]:
        """This micro-batch's part of the step's loss, and its part of every metric."""
        columns = micro.columns
        old = columns.get("old", log_probs.detach())
        result = evaluate(
            self.objective,
            ObjectiveInputs(
                log_probs=log_probs,
                entropy=entropy,
                old_log_probs=old,
                advantages=columns["advantages"],
                mask=torch.ones_like(log_probs, dtype=torch.bool),
                rows=micro.rows,
                denominators=columns["denominators"],
                rollouts=totals.rollouts,
                tokens=totals.tokens,
                trained_rollouts=totals.trained_rollouts,
                rollout_log_probs=columns["rollout"],
            ),
        )
        report = {name: value.double() for name, value in result.metrics.items()}
        report["log_probs"] = log_probs.detach().sum().double() / max(totals.tokens, 1)
        gap = (old - columns["rollout"]).abs()
        report[_LARGEST] = gap.max().double() if gap.numel() else report["log_probs"] * 0
        unused_count = torch.zeros((), dtype=torch.int32, device=self.device)
        return result.loss, unused_count, (micro, report)

    def _metrics(self, reports: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Sums over micro-batches and data-parallel ranks, known to every rank afterwards."""
        names: list[str] = parallel.object_from_last_stage(
            sorted(set(reports[0]) - {_LARGEST}) if reports else []
        )
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        largest = torch.zeros(1, dtype=torch.float64, device=self.device)
        for report in reports:
            sums += torch.stack([report[name] for name in names])
            largest = torch.maximum(largest, report[_LARGEST].reshape(1))
        parallel.sum_over_data_parallel(sums)
        parallel.max_over_data_parallel(largest)
        values = parallel.from_last_stage(torch.cat([sums, largest])).tolist()
        return dict(zip([*names, _LARGEST], values, strict=True))

    def _non_finite_rows(
        self, metrics: dict[str, float], outputs: list[tuple[MicroBatch, dict[str, torch.Tensor]]]
    ) -> list[int]:
        """Rows of the micro-batches, on all ranks, whose loss is NaN or Inf."""
        if math.isfinite(metrics["loss"]):
            return []
        own = [
            row
            for micro, report in outputs
            if not math.isfinite(float(report["loss"]))
            for row in micro.row_ids
        ]
        return sorted({row for rows in parallel.gather_objects(own) for row in rows})
