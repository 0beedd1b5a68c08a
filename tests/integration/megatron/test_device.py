"""The CPU device layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jobs


def test_cuda_means_the_cpu(in_trainer: Callable[..., Any]) -> None:
    found = in_trainer(jobs.device_layer)
    assert set(found.pop("devices")) == {"cpu"}
    assert found == {
        "type": "torch.cuda.FloatTensor",
        "cast": True,
        "elapsed_ms": True,
        "available": False,
        "memory": 0,
    }


def test_it_must_come_before_megatron(in_fresh_process: Callable[..., Any]) -> None:
    assert "imported before the CPU device layer" in in_fresh_process(jobs.import_order)


def test_split_sizes_may_be_tensors(in_ranks: Callable[..., list[Any]]) -> None:
    assert in_ranks(jobs.all_to_all) == [[0, 10, 11], [1, 2, 12, 13]]


def test_a_fingerprint_sees_single_bits_and_places(in_trainer: Callable[..., Any]) -> None:
    found = in_trainer(jobs.fingerprints)
    assert found.pop("again") == found["base"]
    assert len(set(found.values())) == len(found)
