"""Two ranks on gloo: data, tensor and pipeline parallel runs equal one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import models
import pytest
import torch
from safetensors.torch import load_file

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}
BASE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.01,
    # Adam divides by the gradient's size: where that is rounding noise, so would the update be.
    "adam_eps": 1e-2,
    "train_iters": 10,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 64,
    "collective_timeout_s": 60.0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tied, four layers, a vocabulary that padding has to round up."""
    folder = tmp_path_factory.mktemp("par") / "m"
    return models.save_random_model(folder, "qwen3", True, num_hidden_layers=4)


def batches() -> list[Any]:
    return [models.random_batch(models.VOCAB, rows=21, seed=seed, steps=2) for seed in range(3)]


@pytest.fixture(scope="module")
def alone(
    model: str, tmp_path_factory: pytest.TempPathFactory, in_trainer: Callable[..., Any]
) -> dict[str, Any]:
    """The run on one rank, its export and its checkpoint after the second batch."""
    folder = tmp_path_factory.mktemp("alone")
    settings = BASE | {"hf_checkpoint": model}
    run = in_trainer(
        jobs.train, settings, batches(), None, (1, str(folder / "c")), str(folder / "hf")
    )
    return run | {"checkpoint": str(folder / "c"), "export": folder / "hf"}


def steps_of(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for result in outcome["results"] for step in result["steps"]]


def assert_same_numbers(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        for name in ("loss", "entropy_loss", "grad_norm", "ppo_kl", "rollout/log_probs"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=3e-6), name
        for name in ("tokens", "lr", "skipped"):
            assert ours[name] == theirs[name]


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_two_ranks_train_like_one(
    layout: str,
    model: str,
    tmp_path: Path,
    alone: dict[str, Any],
    in_ranks: Callable[..., list[Any]],
) -> None:
    settings = BASE | LAYOUTS[layout] | {"hf_checkpoint": model}
    checkpoint = str(tmp_path / "c")
    first, second = in_ranks(
        jobs.train_on_rank, settings, batches(), None, (1, checkpoint), str(tmp_path / "hf")
    )
    assert steps_of(first) == steps_of(second)
    assert first["start"] == second["start"] == alone["start"], "one run in any layout"
    assert_same_numbers(steps_of(first), steps_of(alone))
    ours = load_file(tmp_path / "hf" / "model.safetensors")
    theirs = load_file(alone["export"] / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, atol=2e-5), name

    # Its own checkpoint continues bit for bit, and that of one rank with the same numbers.
    own = in_ranks(jobs.train_on_rank, settings, batches()[2:], checkpoint)
    assert steps_of(own[0]) == steps_of(first)[4:]
    foreign = in_ranks(jobs.train_on_rank, settings, batches()[2:], alone["checkpoint"])
    assert_same_numbers(steps_of(foreign[0]), steps_of(alone)[4:])


def test_a_checkpoint_of_two_ranks_continues_on_one(
    model: str,
    tmp_path: Path,
    alone: dict[str, Any],
    in_trainer: Callable[..., Any],
    in_ranks: Callable[..., list[Any]],
) -> None:
    settings = BASE | {"hf_checkpoint": model, "tensor_model_parallel_size": 2}
    checkpoint = str(tmp_path / "c")
    in_ranks(jobs.train_on_rank, settings, batches()[:2], None, (1, checkpoint))
    resumed = in_trainer(jobs.train, BASE | {"hf_checkpoint": model}, batches()[2:], checkpoint)
    assert_same_numbers(steps_of(resumed), steps_of(alone)[4:])


def test_ranks_with_different_batches_stop_before_training(
    model: str, in_ranks: Callable[..., list[Any]]
) -> None:
    settings = BASE | {"hf_checkpoint": model}
    for message, tainted in in_ranks(jobs.disagree, settings, batches()[0]):
        assert "different states or batches" in message
        assert tainted


@pytest.mark.parametrize(("vocab", "padded"), [(64, 64), (50, 64), (20, 64)])
def test_a_vocabulary_cut_in_two_gives_the_same_log_probs_entropy_and_gradient(
    vocab: int, padded: int, in_ranks: Callable[..., list[Any]]
) -> None:
    for found in in_ranks(jobs.vocabulary_parallel, vocab, padded):
        assert found["log_probs"] < 3e-6
        assert found["entropy"] < 1e-5
        assert found["gradient"] < 2e-5
