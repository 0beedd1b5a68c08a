"""A trainer in a process of its own, driven by plain calls. It stays between them."""

from __future__ import annotations

from typing import Any

from slime_core.megatron.rank import TrainerRank
from slime_core.megatron.settings import TrainerSettings

_HELD: dict[str, Any] = {}


def setup(settings: dict[str, Any]) -> dict[str, Any]:
    _HELD["rank"] = TrainerRank(TrainerSettings(**settings))
    return _HELD["rank"].setup()


def call(method: str, *args: Any) -> Any:
    return getattr(_HELD["rank"], method)(*args)


def buckets(most_bytes: int) -> list[str]:
    """As the trainer's actor makes them; the memory stays until `release`."""
    from slime_core.engines.tensor_wire import cut_buckets

    _HELD["buckets"] = list(cut_buckets(_HELD["rank"].named_hf_tensors(), most_bytes))
    return [bucket.wire() for bucket in _HELD["buckets"]]


def release() -> None:
    _HELD["buckets"] = []
