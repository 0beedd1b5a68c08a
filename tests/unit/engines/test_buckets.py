"""Weights cut into flat buckets: nothing is lost, none is too large, order stays."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.engines.tensor_wire import FLATTENED_BUCKET, cut_buckets, flatten, parse_tensors
from slime_core.errors import EngineError
from slime_core.weights.sync.transports.tensor import TensorTransport

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(sizes=SIZES, most_bytes=st.integers(1, 200))
def test_buckets_hold_every_tensor_once_in_order(sizes, most_bytes):
    named = [(f"w{i}", torch.randn(size)) for i, size in enumerate(sizes)]
    buckets = list(cut_buckets(named, most_bytes))
    names = [entry.name for bucket in buckets for entry in bucket.entries]
    assert names == [name for name, _ in named]
    for bucket in buckets:
        assert len(bucket.entries) == 1 or bucket.block.numel() <= most_bytes
    for first, second in pairwise(buckets):
        together = first.block.numel() + second.entries[0].numel
        assert together > most_bytes, "the tensor would have fitted into the bucket before"


def test_a_bucket_is_read_back_to_the_bit():
    named = [("a", torch.randn(3, 5)), ("b", torch.arange(7, dtype=torch.bfloat16))]
    bucket = flatten(named)
    for (name, wanted), (read_name, read) in zip(
        named, parse_tensors(bucket.wire(), FLATTENED_BUCKET), strict=True
    ):
        assert name == read_name and wanted.dtype == read.dtype and torch.equal(wanted, read)


def test_an_empty_bucket_is_an_error():
    with pytest.raises(EngineError, match="at least one tensor"):
        list(cut_buckets([], 100))


class Recorder:
    """Stands for the trainer and for an engine's client."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    async def buckets(self, most_bytes: int) -> list[str]:
        self.calls.append(("buckets", most_bytes))
        return ["one", "two", "three"]

    async def release(self) -> None:
        self.calls.append(("release",))

    async def update_weights_from_tensor(self, payloads, version, *, flush_cache, load_format):
        self.calls.append((payloads[0], version, flush_cache, load_format))


def test_the_last_bucket_names_the_version_and_memory_is_freed_at_the_end():
    recorder = Recorder()
    transport = TensorTransport(recorder.buckets, recorder.release, 64)

    async def sync() -> None:
        await transport.prepare("l0-3")
        await transport.send(recorder, "l0-3")  # type: ignore[arg-type]
        await transport.finish("l0-3")

    asyncio.run(sync())
    assert recorder.calls == [
        ("buckets", 64),
        ("one", None, False, FLATTENED_BUCKET),
        ("two", None, False, FLATTENED_BUCKET),
        ("three", "l0-3", False, FLATTENED_BUCKET),
        ("release",),
    ]
