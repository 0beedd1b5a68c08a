"""Packs of rows through one model by Megatron's schedule, and what comes out at trained tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime_core.batching.context_parallel import PackShare, share_of_pack
from slime_core.batching.pack import PackedMicroBatch, pack, pack_sequence
from slime_core.batching.schedule import SchedulePolicy, SequenceCost, schedule_step
from slime_core.batching.types import TrainBatch
from slime_core.megatron import parallel
from slime_core.megatron.attention import Pack
from slime_core.megatron.chunks import forget_activations
from slime_core.megatron.optimizer import TrainState
from slime_core.megatron.routes import Routes, own_places
from slime_core.megatron.settings import TrainerSettings
from slime_core.megatron.share import Share
from slime_core.weights.tables import ModelShape, active_parameters


@dataclass(frozen=True)
class MicroBatch:
    """A pack on the device. P read positions of k rows; context-parallel ranks hold a share of it.

    Attributes:
        tokens, positions: int64 [1, S] of this rank.
        params: the sequences of the pack.
        index: int64 [own], tokens of this rank that predict its own of the P positions; all P
            without context parallelism.
        targets, rows: int64 [P], see PackedMicroBatch.
        share: which of the P positions are this rank's own, None where all are.
        places: see places_of; None where routes are neither recorded nor taken again.
        row_ids: rows of the batch.
        mask: bool [P], trained tokens.
        denominators: float64 [k]; empty in a pass that only reads.
        columns: what the loss needs at each position, [P] each; empty in a pass that only reads.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    params: Pack
    index: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor
    row_ids: tuple[int, ...]
    mask: torch.Tensor
    denominators: torch.Tensor
    columns: dict[str, torch.Tensor]
    share: Share | None = None
    places: torch.Tensor | None = None

    @property
    def own_targets(self) -> torch.Tensor:
        """int64 [own]: what the own positions predict."""
        return self.targets if self.share is None else self.targets[self.share.own]

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """[own, ...] -> [P, ...], see Share.whole."""
        return values if self.share is None else self.share.whole(values)


_MEGATRON = tuple(int(part) for part in megatron_version.split(".")[:2])
Read = Callable[[MicroBatch, torch.Tensor], torch.Tensor]
Report = dict[str, torch.Tensor]
Loss = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Report]]


class Passes:
    """Runs one model. Holds no state of its own but an iteration's routes, where they are replayed:
    a pass of `read` records them or the engine told them, and `train` takes them again."""

    def __init__(
        self,
        settings: TrainerSettings,
        shape: ModelShape,
        state: TrainState,
        *,
        replays_routes: bool = False,
    ) -> None:
        """`replays_routes`: this model takes routes again, if the settings want it."""
        self.settings = settings
        self.shape = shape
        self.state = state
        self.routes: Routes | None = None
        self.device = parallel.device_of(settings)
        algorithm = settings.algorithm
        if replays_routes and algorithm.replays_routes:
            of_engine = algorithm.use_rollout_routing_replay
            self.routes = Routes(state.chunks, shape, self.device, of_engine=of_engine)
        cp_size = settings.context_parallel_size
        self.row_multiple = 2 * cp_size if cp_size > 1 else 1
        self.pad_to = self.row_multiple
        if settings.sequence_parallel:
            self.pad_to *= settings.tensor_model_parallel_size
        # An interleaved pipeline takes micro-batches through one chunk in groups of this size.
        self.group = settings.pipeline_model_parallel_size if settings.virtual_stages else 1
        self._schedule = get_forward_backward_func()

    def train(
        self,
        batch: TrainBatch,
        rows: Sequence[int],
        columns: Mapping[str, torch.Tensor],
        loss: Loss,
        positions: Literal["trained", "response"] = "trained",
    ) -> tuple[list[tuple[MicroBatch, Report]], int]:
        """Forward and backward over this rank's micro-batches of one optimizer step. A collective.

        Args:
            batch: the whole batch of the iteration.
            rows: rows of this step, all ranks together.
            columns: flat columns over the batch's response tokens, [sum R] each.
            loss: micro-batch and hidden states of its own positions -> its part of the step's
                loss, and its part of every metric.
            positions: read trained tokens only, or all response tokens.

        Returns:
            Each micro-batch with its report (nothing but on the last pipeline stage), and the
            number of micro-batches.
        """
        packs = self._packs(batch, rows, self.settings.max_tokens_per_gpu, positions)
        routed = None if self.routes is None else batch
        micro_batches = [self._to_device(packed, batch, columns, routed) for packed in packs]
        scale = self._beside_balance(int(batch.lengths[np.asarray(rows, dtype=np.int64)].sum()))

        def finish(micro: MicroBatch, hidden: torch.Tensor) -> Any:
            value, report = loss(micro, hidden)
            count = torch.zeros((), dtype=torch.int32, device=self.device)  # Megatron's, not used
            return value * scale, count, (micro, report)

        with nullcontext() if self.routes is None else self.routes.training(batch):
            outputs = self._run(micro_batches, finish, forward_only=False)
        return outputs, len(micro_batches)

    def _beside_balance(self, tokens: int) -> float:
        """By what the loss is multiplied, so that Megatron's losses of routers can stand beside it.

        Megatron weighs those of a micro-batch by its tokens and divides all gradients by the
        tokens of the step. Our loss has its own denominators, so it is multiplied by the tokens
        first; where there is no such loss, nothing is changed. Before 0.19, Megatron's ranks that
        share a micro-batch weigh their shares of its loss by their own tokens alone, so that their
        sum would be too small by the number of shares.

        Args:
            tokens: of all rows of the step.
        """
        config = self.state.model.config
        if not (config.moe_aux_loss_coeff or config.moe_z_loss_coeff):
            return 1.0
        shares = 1
        if _MEGATRON < (0, 19):
            shares = self.settings.context_parallel_size
            if self.settings.sequence_parallel:
                shares *= self.settings.tensor_model_parallel_size
        weight = tokens / shares
        config.grad_scale_func = lambda loss: loss / weight
        return weight

    @torch.no_grad()
    def read(
        self, batch: TrainBatch, rows: Sequence[int], read: Read, *, old_policy: bool = False
    ) -> torch.Tensor:
        """Values at all trained response tokens of some rows, with the present weights.

        Runs in micro-batches of its own (log_probs_max_tokens_per_gpu). A collective.

        Args:
            read: micro-batch and hidden states of its own positions -> float32 [P].
            old_policy: where routes are replayed, `train` takes those of this pass, or it takes the
                engine's as `train` does.

        Returns:
            float32 [sum R] over the batch's response tokens, 0 where nothing was read. Valid on
            the last pipeline stage, which alone needs it.
        """
        cap = self.settings.log_probs_max_tokens_per_gpu or self.settings.max_tokens_per_gpu
        packs = self._packs(batch, rows, cap)
        routes = self.routes if old_policy else None
        routed = None if routes is None else batch
        micro_batches = [self._to_device(packed, routed=routed) for packed in packs]
        with nullcontext() if routes is None else routes.reading(batch):
            outputs = self._run(micro_batches, read, forward_only=True)
        flat = torch.zeros(len(batch.loss_mask), dtype=torch.float32, device=self.device)
        for packed, values in zip(packs, outputs, strict=False):
            flat[torch.from_numpy(packed.response_index).to(self.device)] = values
        return parallel.sum_over_data_parallel(flat)

    @torch.no_grad()
    def read_sequence(self, tokens: Sequence[int], read: Read) -> torch.Tensor:
        """What predicts tokens[1:], on every rank. float32 [len(tokens) - 1]. A collective."""
        packed = pack_sequence(tokens, pad_to=self.pad_to, row_multiple=self.row_multiple)
        micro = self._to_device(packed)
        outputs = self._run([micro] * self.group, read, forward_only=True)
        values = torch.zeros(len(tokens) - 1, dtype=torch.float32, device=self.device)
        if outputs:
            values = outputs[0].contiguous()
        return parallel.from_last_stage(values)

    def take_engine_routes(self, batch: TrainBatch) -> None:
        """Where the engine's routes are replayed, those of this batch.

        Raises:
            DataError: it has none, or other ones than this model can take.
        """
        if self.routes is not None and self.routes.of_engine:
            self.routes.take_from_engine(batch)

    def forget_routes(self) -> None:
        """Frees what is kept of an iteration."""
        if self.routes is not None:
            self.routes.forget()

    def _policy(self, max_tokens: int | None) -> SchedulePolicy:
        settings = self.settings
        cap = None
        if settings.use_dynamic_batch_size and max_tokens is not None:
            cap = max_tokens * settings.context_parallel_size
        cost = None
        if settings.data_parallel_size > 1:
            width = self.shape.num_heads * self.shape.head_dim
            # Of the whole model: all pipeline stages must deal the rows alike.
            size = active_parameters(self.shape)
            cost = SequenceCost.of_transformer(size, self.shape.num_layers, width)
        return SchedulePolicy(
            micro_batch_size=settings.micro_batch_size,
            max_tokens=cap,
            cost=cost,
        )

    def _packs(
        self,
        batch: TrainBatch,
        rows: Sequence[int],
        max_tokens: int | None,
        positions: Literal["trained", "response"] = "trained",
    ) -> list[PackedMicroBatch]:
        policy = self._policy(max_tokens)
        plan = schedule_step(batch.lengths.tolist(), rows, self.settings.data_parallel_size, policy)
        padding = ((),) * (-plan.num_micro_batches % self.group)
        mine = (*plan.ranks[parallel_state.get_data_parallel_rank()], *padding)
        lengths = [self.pad_to] * len(mine)
        if self._equal_lengths:
            lengths[: plan.num_micro_batches] = [
                max(self._padded(batch.lengths[np.asarray(ids, dtype=np.int64)]) for ids in packs)
                for packs in zip(*plan.ranks, strict=True)
            ]
        return [
            pack(
                batch,
                ids,
                pad_to=length,
                row_multiple=self.row_multiple,
                positions=positions,
            )
            for ids, length in zip(mine, lengths, strict=True)
        ]

    @property
    def _equal_lengths(self) -> bool:
        """Whether all copies of the model must run equally many tokens at once, since the ranks
        with other experts gather their tokens."""
        gathered = self.state.model.config.moe_token_dispatcher_type == "allgather"
        return gathered and self.settings.expert_model_parallel_size > 1

    def _padded(self, lengths: np.ndarray) -> int:
        """Tokens of a pack."""
        used = int((-(-lengths // self.row_multiple) * self.row_multiple).sum())
        return max(1, -(-used // self.pad_to)) * self.pad_to

    def _to_device(
        self,
        packed: PackedMicroBatch,
        batch: TrainBatch | None = None,
        columns: Mapping[str, torch.Tensor] | None = None,
        routed: TrainBatch | None = None,
    ) -> MicroBatch:
        def move(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        part: PackedMicroBatch | PackShare = packed
        index, share = packed.logit_index, None
        if self.settings.context_parallel_size > 1:
            group = parallel.context_group()
            part = share_of_pack(packed, group.size(), group.rank())
            index, share = part.index, Share(move(part.own), move(part.order), part.most)
        at = move(part.position_ids)
        place = move(packed.response_index)
        row_ids = np.asarray(packed.row_ids, dtype=np.int64)
        trained = np.ones(len(packed.rows), dtype=bool)
        if batch is not None:
            trained = batch.loss_mask[packed.response_index] == 1
        return MicroBatch(
            tokens=move(part.tokens)[None],
            positions=at[None],
            params=self.state.model.pack(move(packed.cu_seqlens), at, packed.max_seqlen),
            index=move(index),
            targets=move(packed.targets),
            rows=move(packed.rows),
            row_ids=packed.row_ids,
            mask=move(trained),
            denominators=move(np.zeros(0) if batch is None else batch.denominators[row_ids]),
            columns={name: column[place] for name, column in (columns or {}).items()},
            share=share,
            places=None if routed is None else own_places(packed, routed, self.settings),
        )

    def _run(self, micro_batches: list[MicroBatch], finish: Any, forward_only: bool) -> list[Any]:
        """Megatron's schedule over this rank's micro-batches; outputs on the last stage."""

        def forward(data: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
            micro = next(data)
            if self.routes is not None:
                self.routes.begin(model, micro.places)
            hidden = model(micro.tokens, micro.positions, None, packed_seq_params=micro.params)
            return hidden, partial(at_positions, micro)

        def at_positions(micro: MicroBatch, hidden: torch.Tensor, **_: bool) -> Any:
            return finish(micro, self.state.model.hidden_rows(hidden, micro.index))

        iterators = [iter(micro_batches) for _ in self.state.chunks]
        outputs = self._schedule(
            forward_step_func=forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list[torch.nn.Module](self.state.chunks),
            num_microbatches=len(micro_batches),
            seq_length=max(micro.tokens.size(1) for micro in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        forget_activations(self.state.models)
        return outputs
