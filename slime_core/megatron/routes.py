"""Routes of tokens to experts: recorded where old log-probs are read, or those that the engine
took, and taken again in the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.batching.pack import PackedMicroBatch
from slime_core.batching.types import TrainBatch
from slime_core.errors import TrainerError
from slime_core.megatron import parallel
from slime_core.megatron.engine_routes import engine_routes, routes_dtype
from slime_core.megatron.layer_spec import Router
from slime_core.megatron.places import places_of
from slime_core.megatron.settings import TrainerSettings
from slime_core.weights.tables import ModelShape

PIECE_BYTES = 1 << 26
"""Routes that travel between ranks at once."""


@dataclass(frozen=True)
class _Given:
    """Routes of the tokens that one router sees at once.

    experts: [tokens, k]; real: bool [tokens], False where the router chooses: for padding, and
    tokens of which the engine tells nothing; trains: False in a pass that only reads, where no
    layer is computed again.
    """

    experts: torch.Tensor
    real: torch.Tensor
    trains: bool


class RouterRoutes:
    """What one router asks for its choice, in the place of Megatron's RouterReplay.

    Megatron's own knows all routers of the process, a critic's among them; this one belongs to one
    model and leaves all others alone.

    Attributes:
        into: [tokens, k], where the router's own choice is written, if anywhere.
        given: what is chosen instead, if anything.
    """

    def __init__(self) -> None:
        self.into: torch.Tensor | None = None
        self.given: _Given | None = None
        self._again: deque[_Given] = deque()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and numbers of the chosen experts, [tokens, k] each. The name is Megatron's.

        Args:
            scores: [tokens, experts].
            default_compute_topk: the router's own choice.
        """
        values, chosen = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.into is not None:
            self.into.copy_(chosen)
        if self.given is None:
            return values, chosen
        given = self._now(self.given)
        chosen = torch.where(given.real[:, None], given.experts.long(), chosen)
        return scores.gather(1, chosen), chosen

    def _now(self, given: _Given) -> _Given:
        """The routes of the micro-batch that is computed now.

        A layer that is to be recomputed runs without gradients first and with them in the backward
        pass, by when a pipeline may have begun later micro-batches. Backward passes come in
        the order of the forward ones.
        """
        if not given.trains:
            return given
        if not torch.is_grad_enabled():
            self._again.append(given)
            return given
        return self._again.popleft() if self._again else given

    def clear(self) -> None:
        """Leaves the choice to the router."""
        self.into, self.given = None, None
        self._again.clear()


@dataclass(frozen=True)
class _Chunk:
    """A chunk of the model as the schedule calls it, and its layers among those of this rank."""

    module: torch.nn.Module
    layers: slice
    routers: list[RouterRoutes]


class Routes:
    """The routes of one iteration's tokens through the layers of this rank's pipeline stage.

    They stay in host memory, for the whole batch on each rank: which rows a rank trains differs
    from which it reads, and so does how they are packed.

    Args:
        of_engine: `take_from_engine` brings what is replayed, and nothing is recorded.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        shape: ModelShape,
        device: torch.device,
        *,
        of_engine: bool = False,
    ) -> None:
        assert shape.num_experts is not None and shape.experts_per_token is not None
        self.of_engine = of_engine
        self._shape = shape
        self._device = device
        self._experts_per_token = shape.experts_per_token
        self._dtype = torch.from_numpy(np.empty(0, routes_dtype(shape.num_experts))).dtype
        self._chunks: list[_Chunk] = []
        self._numbers: list[int] = []  # of this rank's layers in the model, from 0
        self._taken: torch.Tensor | None = None
        self._known: torch.Tensor | None = None
        self._recorded: list[tuple[torch.Tensor, slice, torch.Tensor]] = []
        self._recording = self._trains = False
        for chunk in chunks:
            routers, first = [], len(self._numbers)
            for module in chunk.modules():
                if isinstance(module, Router):
                    assert module.layer_number is not None
                    routers.append(RouterRoutes())
                    module.router_replay = routers[-1]  # type: ignore[assignment]
                    self._numbers.append(module.layer_number - 1)
            self._chunks.append(_Chunk(chunk, slice(first, len(self._numbers)), routers))
        self._layers = len(self._numbers)

    def take_from_engine(self, batch: TrainBatch) -> None:
        """Makes the engine's routes those that are replayed.

        Raises:
            DataError: see engine_routes.
        """
        found = engine_routes(batch, self._numbers, self._shape)
        self._taken = torch.from_numpy(found.experts)
        self._known = torch.from_numpy(found.known)

    @contextmanager
    def reading(self, batch: TrainBatch) -> Iterator[None]:
        """Around the pass for old log-probs: takes the engine's routes, or records the own ones."""
        with self.replaying(batch) if self.of_engine else self.recording(batch):
            yield

    @contextmanager
    def training(self, batch: TrainBatch) -> Iterator[None]:
        """Around the passes of a step."""
        with self.replaying(batch):
            self._trains = True
            yield

    @contextmanager
    def recording(self, batch: TrainBatch) -> Iterator[None]:
        """Inside the block, `begin` keeps the routes of its micro-batch. A collective at its end.

        Args:
            batch: the batch that places refer to.
        """
        size = (len(batch.tokens), self._layers, self._experts_per_token)
        self._taken = torch.zeros(size, dtype=self._dtype)
        self._recording = True
        with self._cleared():
            yield
            for places, layers, experts in self._recorded:
                real = places >= 0
                self._taken[places[real].cpu(), layers] = experts[real].cpu()
            self._sum_over_ranks(self._taken)

    @contextmanager
    def replaying(self, batch: TrainBatch) -> Iterator[None]:
        """Inside the block, each micro-batch takes the routes that are kept for it.

        Raises:
            TrainerError: there are none for this batch.
        """
        if self._taken is None or len(self._taken) != len(batch.tokens):
            raise TrainerError("routes are to be replayed, but none are kept for this batch")
        with self._cleared():
            yield

    def forget(self) -> None:
        """Frees what is kept."""
        self._taken = self._known = None

    def begin(self, module: torch.nn.Module, places: torch.Tensor | None) -> None:
        """Called before a chunk computes a micro-batch.

        Args:
            places: see places.places_of; None where routes are neither recorded nor taken again.
        """
        if places is None or self._taken is None:
            return
        (chunk,) = (one for one in self._chunks if one.module is module)
        if self._recording:
            size = (len(places), len(chunk.routers), self._experts_per_token)
            experts = torch.zeros(size, dtype=self._dtype, device=self._device)
            self._recorded.append((places, chunk.layers, experts))
            for number, router in enumerate(chunk.routers):
                router.into = experts[:, number]
            return
        index = places.clamp(min=0).to(self._taken.device)
        experts = self._taken[index, chunk.layers].to(self._device)
        real = places >= 0
        if self._known is not None:
            real = real & self._known[index].to(real.device)
        for number, router in enumerate(chunk.routers):
            router.given = _Given(experts[:, number], real, self._trains)

    @contextmanager
    def _cleared(self) -> Iterator[None]:
        """Routers choose for themselves after the block."""
        try:
            yield
        finally:
            self._recording = self._trains = False
            self._recorded = []
            for chunk in self._chunks:
                for router in chunk.routers:
                    router.clear()

    def _sum_over_ranks(self, taken: torch.Tensor) -> None:
        """Puts together what the ranks of a pipeline stage recorded: each token on one of them,
        and zeros on all others."""
        group = parallel.stage_group()
        if group.size() == 1:
            return
        for piece in taken.view(torch.uint8).view(-1).split(PIECE_BYTES):
            moved = piece.to(self._device)
            dist.all_reduce(moved, group=group)
            if moved is not piece:
                piece.copy_(moved)


def own_places(
    packed: PackedMicroBatch, batch: TrainBatch, settings: TrainerSettings
) -> torch.Tensor:
    """places_of for this rank, on its device."""
    context: Any = (1, 0)
    sequence: Any = (1, 0)
    if settings.context_parallel_size > 1:
        group = parallel.context_group()
        context = (group.size(), group.rank())
    if settings.sequence_parallel:
        group = parallel.tensor_group()
        sequence = (group.size(), group.rank())
    return torch.from_numpy(places_of(packed, batch, context, sequence)).to(
        parallel.device_of(settings)
    )
