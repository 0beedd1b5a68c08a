"""Trainer processes for the tests: the device layer changes torch for a whole process, so nothing
of the trainer runs in the test process itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_core.batching.types import TrainBatch
from slime_core.engines.launcher import free_port
from tests.integration.megatron import models
from tests.integration.megatron.algorithm_runs import near_policy

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(Path(__file__).parent))  # spawned processes inherit it and find jobs.py

JOB_TIMEOUT_S = 400.0


def new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[list[ProcessPoolExecutor]]:
    """Four processes that stay for the session, each begun by its first job; a trainer is set up
    and closed in each test."""
    pools = [new_pool() for _ in range(4)]
    yield pools
    for pool in pools:
        pool.shutdown(wait=True, cancel_futures=True)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, all different."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


@pytest.fixture(scope="session")
def in_trainer(rank_pools: list[ProcessPoolExecutor]) -> Callable[..., Any]:
    """Runs a job in a trainer process."""

    def run(job: Callable[..., Any], *args: Any) -> Any:
        return rank_pools[0].submit(job, *args).result(JOB_TIMEOUT_S)

    return run


@pytest.fixture(scope="session")
def in_ranks(rank_pools: list[ProcessPoolExecutor]) -> Callable[..., list[Any]]:
    """Runs a job on two ranks at once: job(rank, port, *args); returns both results."""

    def run(job: Callable[..., Any], *args: Any) -> list[Any]:
        (port,) = free_ports(1)
        pending = [pool.submit(job, rank, port, *args) for rank, pool in enumerate(rank_pools[:2])]
        return [future.result(JOB_TIMEOUT_S) for future in pending]

    return run


@pytest.fixture
def in_fresh_process() -> Iterator[Callable[..., Any]]:
    """Runs a job in a process of its own."""
    pool = new_pool()
    yield lambda job, *args: pool.submit(job, *args).result(JOB_TIMEOUT_S)
    pool.shutdown(wait=True, cancel_futures=True)


@pytest.fixture(scope="session")
def shipped_model() -> str:
    """The model that the quickstart ships."""
    return str(ROOT / "configs" / "quickstart" / "model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("algorithms")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return models.save_random_model(folder / "m", "qwen3", True)


@pytest.fixture(scope="module")
def reference(folder: Path, model: str) -> str:
    """The model with other weights, not far away."""
    own = models.load_model(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    own.save_pretrained(folder / "reference")
    return str(folder / "reference")


@pytest.fixture(scope="module")
def batch(model: str) -> TrainBatch:
    """One step, engine log-probs near the model's own."""
    return near_policy(model, models.random_batch(models.VOCAB))


@pytest.fixture(scope="module")
def two_steps(model: str) -> TrainBatch:
    return near_policy(model, models.random_batch(models.VOCAB, steps=2))
