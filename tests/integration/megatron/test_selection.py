"""Parameters that are not to be trained keep their bits, cost no optimizer state, and leave the
gradient norm; the others move as they would in plain torch."""

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

from slime_core.errors import ConfigError

BASE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "adam_eps": 1e-2,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 64,
    "collective_timeout_s": 60.0,
}
CHOICES = {
    "only": {"only_train_params_name_list": [r"layers\.[12]\..*attention"]},
    "frozen": {"freeze_params_name_list": ["embedding", "mlp", "norm", r"layers\.0\."]},
}
TRAINED = ("model.layers.1.self_attn", "model.layers.2.self_attn")


def chosen(name: str, choice: str) -> bool:
    return name.startswith(TRAINED) and not (choice == "frozen" and "norm" in name)


def moved(model: str, folder: Path) -> set[str]:
    before, after = load_file(Path(model) / "model.safetensors"), load_file(folder)
    return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("choice", sorted(CHOICES))
def test_only_what_was_chosen_moves(
    choice: str, model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    settings = BASE | {"hf_checkpoint": model} | CHOICES[choice]
    seen = [models.random_batch(models.VOCAB, seed=seed) for seed in range(3)]
    checkpoint, exported = str(tmp_path / "c"), tmp_path / "hf"
    run = in_trainer(jobs.train, settings, seen, None, (1, checkpoint), str(exported))
    names = set(load_file(Path(model) / "model.safetensors"))
    wanted = {name for name in names if chosen(name, choice)}
    assert moved(model, exported / "model.safetensors") == wanted

    whole = in_trainer(jobs.train, BASE | {"hf_checkpoint": model}, seen[:1])
    own, full = (r["results"][0]["steps"][0] for r in (run, whole))
    assert own["loss"] == full["loss"]
    assert 0 < own["grad_norm"] < full["grad_norm"]

    stored = in_trainer(jobs.stored_tensors, settings, checkpoint)
    moments = [name for name in stored if "exp_avg_sq" in name]
    assert moments and all("attention" in name for name in moments)
    assert all(np.isfinite(stored[name]).all() for name in moments)
    again = in_trainer(jobs.train, settings, seen[2:], checkpoint)
    assert again["results"][0]["steps"] == run["results"][2]["steps"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}]
)
def test_the_choice_is_the_same_in_any_layout(
    layout: dict[str, int],
    tmp_path: Path,
    in_trainer: Callable[..., Any],
    in_ranks: Callable[..., list[Any]],
) -> None:
    """A tied embedding is frozen, and the stages number their layers from 0 each."""
    model = models.save_random_model(tmp_path / "m", "qwen3", True, num_hidden_layers=4)
    settings = BASE | {"hf_checkpoint": model, "freeze_params_name_list": ["embedding", "mlp"]}
    settings["only_train_params_name_list"] = [r"layers\.[02]\."]
    seen = [models.random_batch(models.VOCAB, rows=21, seed=seed) for seed in range(2)]
    alone = in_trainer(jobs.train, settings, seen)
    ranks = in_ranks(jobs.train_on_rank, settings | layout, seen, None, None, str(tmp_path / "hf"))
    for one, other in zip(alone["results"], ranks[0]["results"], strict=True):
        for name in ("loss", "grad_norm", "rollout/log_probs"):
            assert other["steps"][0][name] == pytest.approx(one["steps"][0][name], rel=1e-5)
    changed = moved(model, tmp_path / "hf" / "model.safetensors")
    assert changed and {name.split(".")[2] for name in changed} == {"0", "2"}


@pytest.mark.slow
def test_a_stage_without_anything_to_train_is_refused(
    model: str, in_ranks: Callable[..., list[Any]]
) -> None:
    settings = BASE | {
        "hf_checkpoint": model,
        "pipeline_model_parallel_size": 2,
        "only_train_params_name_list": [r"layers\.0\."],
        "megatron": {"num_layers_in_first_pipeline_stage": 1},
    }
    with pytest.raises(ConfigError, match="leave a pipeline stage without a parameter"):
        in_ranks(jobs.train_on_rank, settings, [models.random_batch(models.VOCAB)])
