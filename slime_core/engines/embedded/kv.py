"""Key-value storage of the requests that decode together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime_core.engines.embedded.request import Request

LayerKV = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [rows, kv heads, positions, head dim]."""

MIN_WIDTH = 16


def width_class(tokens: int, smallest: int = MIN_WIDTH) -> int:
    """Rounds a length up to the width that it is computed at.

    A width depends on the request's own length only, so in deterministic mode the shapes that a
    request passes through never depend on its neighbours. Steps: multiples of 16 up to 64, then
    powers of two and the points half way between them.
    """
    if tokens <= smallest:
        return smallest
    if tokens <= 64:
        return -(-tokens // 16) * 16
    power = 1 << (tokens - 1).bit_length()
    half_way = power * 3 // 4
    return half_way if tokens <= half_way else power


class KVPool:
    """Rows of equal width, kept dense: row i belongs to requests[i].

    Attributes:
        width: positions that each row can hold.
        min_rows: rows that a forward pass has at least; those without a request are ignored.
        layers: per layer keys and values [capacity, kv heads, width, head dim].
    """

    def __init__(self, width: int, min_rows: int) -> None:
        self.width = width
        self.min_rows = min_rows
        self.requests: list[Request] = []
        self.layers: list[LayerKV] = []

    @property
    def rows(self) -> int:
        """Rows of the next forward pass."""
        return max(len(self.requests), self.min_rows)

    @property
    def capacity(self) -> int:
        return self.layers[0][0].shape[0] if self.layers else 0

    def append(self, requests: Sequence[Request], layers: Sequence[LayerKV]) -> None:
        """Adds requests whose first positions are already computed.

        Args:
            requests: one per row.
            layers: per layer keys and values [len(requests), kv heads, positions, head dim],
                positions at most the pool's width.
        """
        first, end = len(self.requests), len(self.requests) + len(requests)
        self._reserve(max(end, self.min_rows), layers)
        for store, new in zip(self.layers, layers, strict=True):
            for whole, part in zip(store, new, strict=True):
                positions = part.shape[2]
                whole[first:end, :, :positions] = part
                # What an earlier row left behind must not reach this one: a masked NaN is a NaN.
                whole[first:end, :, positions:] = 0
        self.requests.extend(requests)

    def rows_of(self, indices: list[int]) -> list[LayerKV]:
        """Copies rows out, for another pool."""
        index = torch.tensor(indices, device=self.layers[0][0].device)
        return [(keys[index], values[index]) for keys, values in self.layers]

    def remove(self, indices: set[int]) -> None:
        """Drops rows; the last ones move into the holes."""
        kept = len(self.requests) - len(indices)
        holes = sorted(index for index in indices if index < kept)
        movers = [i for i in range(kept, len(self.requests)) if i not in indices]
        if holes:
            device = self.layers[0][0].device
            to, source = torch.tensor(holes, device=device), torch.tensor(movers, device=device)
            for keys, values in self.layers:
                keys[to] = keys[source]
                values[to] = values[source]
        for hole, mover in zip(holes, movers, strict=True):
            self.requests[hole] = self.requests[mover]
        del self.requests[kept:]

    def widen(self, width: int) -> None:
        """Gives every row more positions."""
        old, self.width = self.layers, width
        rows, self.layers = len(self.requests), []
        if rows:
            requests, self.requests = self.requests, []
            self.append(requests, [(keys[:rows], values[:rows]) for keys, values in old])

    def _reserve(self, rows: int, like: Sequence[LayerKV]) -> None:
        if rows <= self.capacity:
            return
        capacity = max(rows, 2 * self.capacity)
        held = len(self.requests)
        grown: list[LayerKV] = []
        for layer, parts in enumerate(like):
            pair = []
            for which, part in enumerate(parts):
                shape = (capacity, part.shape[1], self.width, part.shape[3])
                whole = torch.zeros(shape, dtype=part.dtype, device=part.device)
                if held:
                    whole[:held] = self.layers[layer][which][:held]
                pair.append(whole)
            grown.append((pair[0], pair[1]))
        self.layers = grown


class DecodeCache:
    """The cache object that a transformers model sees in one decode step.

    Each row writes its newest key and value at its own position and reads the whole row; the
    attention mask hides what lies behind that position.
    """

    is_compileable = False

    def __init__(self, layers: list[LayerKV], columns: torch.Tensor, width: int) -> None:
        """
        Args:
            layers: the pool's storage.
            columns: position that each row writes, [rows].
            width: positions that attention reads.
        """
        self._layers = layers
        self._columns = columns
        self._rows = torch.arange(len(columns), device=columns.device)
        self._width = width

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_, **__
    ) -> LayerKV:
        """Stores [rows, kv heads, 1, head dim]; returns views [rows, kv heads, width, head dim]."""
        keys, values = self._layers[layer_idx]
        rows = len(self._columns)
        keys[self._rows, :, self._columns] = key_states[:, :, 0]
        values[self._rows, :, self._columns] = value_states[:, :, 0]
        return keys[:rows, :, : self._width], values[:rows, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._width
