"""The shipped tiny model, for tests of the embedded engine's parts."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from slime_core.engines.embedded.model import ServedModel
from slime_core.engines.embedded.request import LogProbAsk, Request
from slime_core.engines.embedded.sampling_params import SamplingParams
from slime_core.engines.embedded.scheduler import Limits, Scheduler
from slime_core.engines.embedded.stopping import StopRules
from slime_core.engines.embedded.tokenizer import load_tokenizer

MODEL_PATH = Path(__file__).parents[3] / "configs/quickstart/model"
END = 2


@pytest.fixture(scope="session")
def model_path() -> Path:
    return MODEL_PATH


@pytest.fixture(scope="session")
def shared_model() -> ServedModel:
    torch.set_num_threads(1)
    return ServedModel(str(MODEL_PATH))


@pytest.fixture(scope="session")
def steady_model() -> ServedModel:
    torch.set_num_threads(1)
    return ServedModel(str(MODEL_PATH), deterministic=True)


@pytest.fixture
def private_model(shared_model: ServedModel) -> ServedModel:
    """A model whose weights a test may change."""
    clone = copy.copy(shared_model)
    clone.module = copy.deepcopy(shared_model.module)
    clone.body = clone.module.base_model
    return clone


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(str(MODEL_PATH))


@pytest.fixture
def new_scheduler(shared_model, steady_model, tokenizer):
    def build(model=None, **limits) -> Scheduler:
        model = model or (steady_model if limits.get("deterministic") else shared_model)
        rules = StopRules(frozenset({END}), tokenizer.decode)
        scheduler = Scheduler(model, rules, Limits(**limits))
        scheduler.weight_version = "v0"
        return scheduler

    return build


@pytest.fixture
def new_request():
    """A request with counted ids and seeds."""
    count = 0

    def build(
        prompt: list[int], limit: int = 6, ask: LogProbAsk | None = None, **params
    ) -> Request:
        nonlocal count
        count += 1
        seed = params.pop("sampling_seed", count)
        return Request(
            rid=f"r{count}",
            prompt=prompt,
            params=SamplingParams(max_new_tokens=limit, **params),
            seed=seed,
            limit=limit,
            ask=ask or LogProbAsk(wanted=True),
        )

    return build


def run_all(scheduler: Scheduler, requests: list[Request], most_steps: int = 2000) -> None:
    """Runs requests to their end."""
    scheduler.submit(requests)
    for _ in range(most_steps):
        if scheduler.idle:
            return
        scheduler.step()
    raise AssertionError(f"{most_steps} steps did not end {len(requests)} requests")
