"""How Hugging Face tensors are laid out in a Megatron parameter, and its tensor-parallel cuts.

Every layout has two pairs of inverses: join/split (Hugging Face <-> whole parameter) and
shard/unshard (whole parameter <-> tensor-parallel ranks). torch is imported where tensors are put
together, so that names and shapes can be read without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from slime_core.weights.tables.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor


class Layout(Protocol):
    """The two pairs of inverses. `axis` is the one that tensor parallelism cuts, None for none."""

    @property
    def axis(self) -> int | None: ...

    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        """Hugging Face tensors -> the whole Megatron parameter."""
        ...

    def split(self, whole: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        """The whole Megatron parameter -> Hugging Face tensors."""
        ...

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The part of one tensor-parallel rank."""
        ...

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """All ranks' parts, in rank order -> the whole parameter."""
        ...


@dataclass(frozen=True)
class Plain:
    """One tensor, replicated (axis None) or cut along one axis."""

    axis: int | None = None

    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        return parts[0]

    def split(self, whole: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return (whole,)

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return whole if self.axis is None else whole.chunk(size, self.axis)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        if self.axis is None or len(shards) == 1:
            return shards[0]
        return _cat(shards, self.axis)


@dataclass(frozen=True)
class VocabularyRows:
    """Rows of the vocabulary, padded with zero rows to `padded_vocab_size`; cut along rows."""

    axis: int | None = 0

    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        missing = shape.padded_vocab_size - shape.vocab_size
        if missing == 0:
            return parts[0]
        return _cat([parts[0], parts[0].new_zeros(missing, *parts[0].shape[1:])])

    def split(self, whole: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return (whole[: shape.vocab_size],)

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return whole.chunk(size, 0)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0] if len(shards) == 1 else _cat(shards, 0)


@dataclass(frozen=True)
class QueryKeyValue:
    """Query, key and value rows interleaved by KV group: per group its query heads, key, value.

    Works for weights [rows, hidden] and biases [rows]. The cut falls between groups.
    """

    axis: int | None = 0

    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        groups = [
            part.reshape(shape.num_kv_heads, -1, *part.shape[1:])  # [groups, rows a group, ...]
            for part in parts
        ]
        return _cat(groups, 1).flatten(0, 1)

    def split(self, whole: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        queries = shape.num_heads // shape.num_kv_heads * shape.head_dim
        groups = whole.reshape(shape.num_kv_heads, -1, *whole.shape[1:])
        parts = groups.split([queries, shape.head_dim, shape.head_dim], 1)
        return tuple(part.flatten(0, 1) for part in parts)

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return whole.chunk(size, 0)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0] if len(shards) == 1 else _cat(shards, 0)


@dataclass(frozen=True)
class GateUp:
    """Gate rows above up rows; every rank holds its part of both halves."""

    axis: int | None = 0

    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        return _cat(parts, 0)

    def split(self, whole: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return tuple(whole.chunk(2, 0))

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        if size == 1:
            return whole
        return _cat([half.chunk(size, 0)[rank] for half in whole.chunk(2, 0)], 0)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        if len(shards) == 1:
            return shards[0]
        halves = [shard.chunk(2, 0) for shard in shards]
        return _cat([gate for gate, _ in halves] + [up for _, up in halves], 0)


def _cat(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    import torch

    return torch.cat(list(parts), axis)


REPLICATED = Plain()
ROWS = Plain(0)
COLUMNS = Plain(1)
VOCABULARY = VocabularyRows()
QKV = QueryKeyValue()
GATE_UP = GateUp()
