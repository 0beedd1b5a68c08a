"""Interleaved pipelines: a rank holds several chunks of the model, and all that is done with a
model is done with all of them. Loss, gradient and critic stand in test_invariance.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.errors import ConfigError

pytestmark = pytest.mark.slow

INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
BASE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "adam_eps": 1e-2,
    "train_iters": 20,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 64,
    "collective_timeout_s": 60.0,
}
InTrainer = Callable[..., Any]
InRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers, one for each virtual stage; tied, so that the last one copies the embedding."""
    folder = tmp_path_factory.mktemp("interleaved") / "m"
    return models.save_random_model(folder, "qwen3", True, num_hidden_layers=4)


@pytest.fixture(scope="module")
def other(deep: str) -> str:
    """The same model with other weights."""
    own = models.load_model(deep)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    folder = Path(deep).with_name("other")
    own.save_pretrained(folder)
    return str(folder)


def batches(count: int) -> list[Any]:
    """Two steps each; the numbers of micro-batches are odd and even."""
    return [models.random_batch(models.VOCAB, rows=21, seed=k, steps=2) for k in range(count)]


def steps_of(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for result in outcome["results"] for step in result["steps"]]


def assert_same_numbers(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs)
    for mine, one in zip(ours, theirs, strict=True):
        assert mine.keys() == one.keys()
        for name in ("loss", "grad_norm", "kl_loss", "ppo_kl", "rollout/log_probs"):
            if name in one:
                assert mine[name] == pytest.approx(one[name], rel=1e-5, abs=3e-6), name


def test_a_checkpoint_goes_to_one_rank_and_back_without_losing_a_bit(
    deep: str, tmp_path: Path, in_trainer: InTrainer, in_ranks: InRanks
) -> None:
    settings = BASE | {"hf_checkpoint": deep}
    seen = batches(3)
    first, alone, again = (str(tmp_path / name) for name in ("vpp2", "one", "vpp2b"))
    run = in_ranks(jobs.train_on_rank, settings | INTERLEAVED, seen, None, (1, first))[0]
    own = in_ranks(jobs.train_on_rank, settings | INTERLEAVED, seen[2:], first)[0]
    assert steps_of(own) == steps_of(run)[4:], "its own checkpoint continues bit for bit"
    steps = [
        steps_of(run)[4],
        in_trainer(jobs.reshard, settings, first, alone, seen[2]),
        in_ranks(jobs.reshard_on_rank, settings | INTERLEAVED, alone, again, seen[2])[0],
    ]
    wanted = in_trainer(jobs.stored_tensors, settings, first)
    assert all(np.abs(wanted[name]).max() > 0 for name in wanted if "exp_avg" in name)
    for folder in (alone, again):
        found = in_trainer(jobs.stored_tensors, settings, folder)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert np.array_equal(found[name], tensor), (folder, name)
    for step in steps[1:]:
        assert step["loss"] == pytest.approx(steps[0]["loss"], rel=1e-5, abs=3e-6)
        assert step["grad_norm"] == pytest.approx(steps[0]["grad_norm"], rel=1e-5)
    assert steps[2]["weights_digest"] == steps[0]["weights_digest"], "back where it came from"


def test_a_reference_and_frozen_parameters_reach_all_chunks(
    deep: str, other: str, tmp_path: Path, in_trainer: InTrainer, in_ranks: InRanks
) -> None:
    """Gradients are summed while the backward pass runs, which each chunk has to put off."""
    algorithm = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.5, ref_load=other)
    settings = BASE | {
        "hf_checkpoint": deep,
        "algorithm": algorithm,
        "freeze_params_name_list": ["embedding", "mlp"],
        "megatron": {"overlap_grad_reduce": True},
    }
    exported = tmp_path / "hf"
    alone = in_trainer(jobs.train, settings, batches(2))
    ranks = in_ranks(
        jobs.train_on_rank, settings | INTERLEAVED, batches(2), None, None, str(exported)
    )
    assert steps_of(ranks[0]) == steps_of(ranks[1])
    assert_same_numbers(steps_of(ranks[0]), steps_of(alone))
    assert all(step["kl_loss"] != 0 for step in steps_of(alone))
    before = load_file(Path(deep) / "model.safetensors")
    after = load_file(exported / "model.safetensors").items()
    changed = {name for name, tensor in after if not torch.equal(tensor, before[name])}
    assert {name.split(".")[2] for name in changed if "layers" in name} == set("0123")
    assert not any("mlp" in name or "embed" in name for name in changed)


def test_weights_begin_as_megatron_has_saved_them(
    deep: str, other: str, tmp_path: Path, in_trainer: InTrainer, in_ranks: InRanks
) -> None:
    saved, exported = str(tmp_path / "megatron"), tmp_path / "hf"
    in_trainer(jobs.write_as_megatron_lm, {"hf_checkpoint": other}, saved, str(tmp_path / "trap"))
    settings = {"hf_checkpoint": deep, "megatron_load": saved} | INTERLEAVED
    in_ranks(jobs.export_on_rank, settings, str(exported))
    ours = load_file(exported / "model.safetensors")
    theirs = load_file(Path(other) / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_virtual_stage_without_anything_to_train_is_refused(deep: str, in_ranks: InRanks) -> None:
    """Both ranks train a layer, but one of four chunks has none."""
    settings = BASE | INTERLEAVED | {"hf_checkpoint": deep}
    settings["only_train_params_name_list"] = [r"layers\.[012]\."]
    with pytest.raises(ConfigError, match="leave a pipeline stage without a parameter"):
        in_ranks(jobs.train_on_rank, settings, batches(1))
