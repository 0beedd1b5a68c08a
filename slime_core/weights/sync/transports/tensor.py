"""Weights as buckets of tensors in shared memory (CUDA IPC on a GPU), named in the request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from slime_core.engines.client import EngineClient

FLATTENED_BUCKET = "flattened_bucket"
Buckets = Callable[[int], Awaitable[list[str]]]
Release = Callable[[], Awaitable[None]]


class TensorTransport:
    """Sends numbered buckets to each engine; the last one carries the new version.

    Args:
        buckets: largest size in bytes -> serialised buckets, made by the trainer's rank 0, which
            keeps the memory until `release` or the next call.
        release: lets rank 0 free the memory of the last buckets.
        bucket_bytes: largest size of a bucket.
    """

    def __init__(self, buckets: Buckets, release: Release, bucket_bytes: int) -> None:
        self._buckets = buckets
        self._release = release
        self._bucket_bytes = bucket_bytes
        self._ready: list[str] = []

    async def prepare(self, version: str) -> None:
        self._ready = await self._buckets(self._bucket_bytes)

    async def send(self, client: EngineClient, version: str) -> None:
        for number, bucket in enumerate(self._ready):
            last = number == len(self._ready) - 1
            await client.update_weights_from_tensor(
                [bucket],
                version if last else None,
                flush_cache=False,
                load_format=FLATTENED_BUCKET,
            )

    async def finish(self, version: str) -> None:
        """Every engine has answered, so nobody reads the buckets any more."""
        self._ready = []
        await self._release()
