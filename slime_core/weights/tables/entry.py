"""A table's row: one Megatron parameter, the Hugging Face tensors behind it, and the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime_core.errors import ConfigError
from slime_core.weights.tables.layouts import Layout
from slime_core.weights.tables.shape import ModelShape

if TYPE_CHECKING:
    import torch

Place = Literal["first", "layer", "last"]


@dataclass(frozen=True)
class Part:
    """One Hugging Face tensor: its name ("{layer}" and "{expert}" stand for indices) and its named
    axes."""

    name: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A row of a table.

    Attributes:
        megatron: name inside GPTModel; "{layer}" is the global layer index, "{expert}" the
            global expert index.
        parts: the Hugging Face tensors that make it up.
        layout: how parts become one tensor, and how that is cut for tensor parallelism.
        place: "first" (embedding stage), "layer", or "last" (final stage of a pipeline).
        untied_only: absent when the head is tied to the embedding.
        of_expert: each expert of a layer has one.
    """

    megatron: str
    parts: tuple[Part, ...]
    layout: Layout
    place: Place = "layer"
    untied_only: bool = False
    of_expert: bool = False

    def bind(
        self, shape: ModelShape, layer: int | None = None, expert: int | None = None
    ) -> BoundEntry:
        """Fills in the indices of layer and expert, and the sizes of one model."""

        def name(text: str) -> str:
            return text.replace("{layer}", str(layer)).replace("{expert}", str(expert))

        return BoundEntry(
            megatron=name(self.megatron),
            hf_names=tuple(name(part.name) for part in self.parts),
            hf_shapes=tuple(tuple(shape.size_of(a) for a in part.axes) for part in self.parts),
            layout=self.layout,
            place=self.place,
            layer=layer,
            expert=expert,
            shape=shape,
        )


@dataclass(frozen=True)
class BoundEntry:
    """An entry of one concrete model; both directions of the mapping."""

    megatron: str
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    layout: Layout
    place: Place
    layer: int | None
    expert: int | None
    shape: ModelShape

    def to_megatron(
        self, parts: Sequence[torch.Tensor], rank: int = 0, size: int = 1
    ) -> torch.Tensor:
        """This tensor-parallel rank's shard of the Megatron parameter.

        Args:
            parts: the Hugging Face tensors in the order of `hf_names`.
            rank, size: place in the tensor-parallel group.

        Raises:
            ConfigError: a tensor's shape does not fit the model's config.json.
        """
        for name, part, expected in zip(self.hf_names, parts, self.hf_shapes, strict=True):
            if tuple(part.shape) != expected:
                raise ConfigError(
                    f"tensor {name} has shape {list(part.shape)}, but config.json makes it "
                    f"{list(expected)}: weights and config do not belong together"
                )
        return self.layout.shard(self.layout.join(parts, self.shape), rank, size)

    def to_hf(self, shards: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """The inverse: named Hugging Face tensors from the shards of all tensor-parallel ranks."""
        whole = self.layout.unshard(shards)
        return list(zip(self.hf_names, self.layout.split(whole, self.shape), strict=True))
