"""SampleBatch: stored samples as columns, without making a Python object of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from slime_core.errors import DataError
from slime_core.sample import Sample
from slime_core.store.codec import Rows, decode_samples, samples_to_rows, stored_experts
from slime_core.store.planes import refuse_lost


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one flat array. Null rows have length 0.

    Attributes:
        values: [sum of lengths], a read-only view of the file where that is mapped.
        offsets: int64 [rows + 1], row i is values[offsets[i]:offsets[i + 1]].
        valid: bool [rows], False where the row is null.
    """

    values: np.ndarray
    offsets: np.ndarray
    valid: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]"""
        return np.diff(self.offsets)

    def row(self, i: int) -> np.ndarray:
        return self.values[self.offsets[i] : self.offsets[i + 1]]


class SampleBatch:
    """A columnar view of samples.

    Number columns are views of Arrow's memory as long as the rows lie in one record batch; rows
    from several are put together once, when they are asked for.

    Attributes:
        lost: planes that these rows had and that were given up.
    """

    def __init__(self, rows: Rows, lost: frozenset[str] = frozenset()) -> None:
        self.rows, self.lost = rows, lost

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> SampleBatch:
        return cls(samples_to_rows(samples))

    def __len__(self) -> int:
        return self.rows.num_rows

    def to_samples(self, spared: Collection[str] = ()) -> list[Sample]:
        """Whole samples.

        Args:
            spared: planes that may be missing.

        Raises:
            DataError: another plane of these rows was given up.
        """
        refuse_lost(self.lost, spared)
        return decode_samples(self.rows)

    @property
    def tokens(self) -> Ragged:
        """int32, prompt and response."""
        return self.ragged("tokens")

    @property
    def loss_mask(self) -> Ragged:
        """uint8, response tokens."""
        return self.ragged("loss_mask")

    @property
    def rollout_log_probs(self) -> Ragged:
        """float32, response tokens."""
        return self.ragged("rollout_log_probs")

    def ragged(self, name: str) -> Ragged:
        """A column of number lists."""
        array = self._array(name)
        if not pa.types.is_large_list(array.type):
            raise DataError(f"{name} is no column of lists but of {array.type}")
        offsets, values = array.offsets.to_numpy(), array.values.to_numpy()
        first, end = offsets[0], offsets[-1]
        if first or end != len(values):
            values, offsets = values[first:end], offsets - first
        return Ragged(values, offsets, _valid(array))

    def experts(self) -> list[np.ndarray | None]:
        """Routed experts of each row in the type that they are stored in, views of the file where
        that is mapped; None where there are none."""
        data = self._array("rollout_routed_experts")
        if data.null_count == len(data):
            return [None] * len(data)
        shapes = self._array("rollout_routed_experts_shape").to_pylist()
        return [
            None if shape is None else stored_experts(one.as_buffer(), shape)
            for one, shape in zip(data, shapes, strict=True)
        ]

    def numbers(self, name: str) -> np.ndarray:
        """A column of numbers or booleans. [rows]

        Raises:
            DataError: it holds nulls; ask `valid` first.
        """
        array = self._array(name)
        if array.null_count:
            raise DataError(f"{array.null_count} of {len(array)} rows have no {name}")
        return array.to_numpy(zero_copy_only=False)

    def texts(self, name: str) -> list[str | None]:
        """A column of text. [rows]"""
        return self._array(name).to_pylist()

    def valid(self, name: str) -> np.ndarray:
        """bool [rows]: where a column is not null."""
        return _valid(self._array(name))

    def _array(self, name: str) -> pa.Array:
        if name not in self.rows.schema.names:
            raise DataError(f"these rows have no column {name}")
        column = self.rows.column(name)
        if not isinstance(column, pa.ChunkedArray):
            return column
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _valid(array: pa.Array) -> np.ndarray:
    """bool [rows]"""
    if not array.null_count:
        return np.ones(len(array), dtype=bool)
    return array.is_valid().to_numpy(zero_copy_only=False)
