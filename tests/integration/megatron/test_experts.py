"""Models with experts: training, checkpoints and what asks for a balance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import memory_jobs
import models
import pytest
import torch
from safetensors.torch import load_file

from slime_core.algorithms.settings import AlgorithmSettings

BASE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.0,
    "train_iters": 10,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 4096,
}
FAMILY = "qwen3_moe"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save_random_model(tmp_path_factory.mktemp("experts") / "m", FAMILY, False)


@pytest.mark.parametrize("balance", [0.0, 0.1])
def test_one_step_equals_plain_torch(
    balance: float, model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    batch = models.random_batch(models.VOCAB)
    want = models.reference_step(
        model, batch, temperature=1.0, lr=1e-3, per_token=False, entropy_coef=0.01, clip_grad=1.0,
        balance=balance,
    )  # fmt: skip
    settings = BASE | {
        "hf_checkpoint": model,
        "algorithm": AlgorithmSettings(entropy_coef=0.01),
        "megatron": {"moe_aux_loss_coeff": balance},
    }
    out = in_trainer(jobs.train, settings, [batch], None, None, str(tmp_path / "after"))
    (step,) = out["results"][0]["steps"]
    assert step["loss"] == pytest.approx(want.loss, rel=1e-5, abs=1e-6)
    assert step["grad_norm"] == pytest.approx(want.grad_norm, rel=1e-5)
    after = load_file(tmp_path / "after" / "model.safetensors")
    before = load_file(Path(model) / "model.safetensors")
    wanted = unfused(want.weights)
    assert after.keys() == wanted.keys()
    for name, tensor in after.items():
        wrong = ((tensor - wanted[name]).abs() > 1e-5).float().mean()
        assert wrong < 2e-3, name
        assert not torch.equal(tensor, before[name]), name


def test_a_closed_trainer_frees_its_model(model: str, in_trainer: Callable[..., Any]) -> None:
    batch = models.random_batch(models.VOCAB)
    settings = BASE | {"hf_checkpoint": model}
    assert not in_trainer(memory_jobs.model_outlives_its_trainer, settings, batch)


def unfused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts by their names in files."""
    found = {}
    for name, tensor in weights.items():
        layer, _, kind = name.rpartition(".")
        if not layer.endswith(".experts"):
            found[name] = tensor
            continue
        for expert, part in enumerate(tensor):
            if kind == "down_proj":
                found[f"{layer}.{expert}.down_proj.weight"] = part
            else:
                gate, up = part.chunk(2)
                found[f"{layer}.{expert}.gate_proj.weight"] = gate
                found[f"{layer}.{expert}.up_proj.weight"] = up
    return found


def test_a_balance_weighs_tokens_and_not_micro_batches(
    model: str, in_trainer: Callable[..., Any]
) -> None:
    """Each micro-batch has its own shares, so norms differ a little, and not by their number."""
    batch = models.random_batch(models.VOCAB)
    settings = BASE | {"hf_checkpoint": model, "megatron": {"moe_aux_loss_coeff": 0.1}}
    norms = [
        in_trainer(jobs.train, settings | {"max_tokens_per_gpu": tokens}, [batch])["results"][0][
            "steps"
        ][0]["grad_norm"]
        for tokens in (4096, 128)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


BALANCED = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
CUT = {
    "dp2": {},
    "ep2": {"expert_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {
        "pipeline_model_parallel_size": 2,
        "megatron": {"num_layers_in_first_pipeline_stage": 1},
    },
}


@pytest.fixture(scope="module")
def row_by_row(model: str, in_trainer: Callable[..., Any]) -> dict[str, Any]:
    """Each row is a micro-batch, which has shares of its own, and none needs padding."""
    batches = [models.random_batch(models.VOCAB, seed=seed, multiple=4) for seed in range(2)]
    settings = BASE | {
        "hf_checkpoint": model,
        "adam_eps": 1e-2,
        "use_dynamic_batch_size": False,
        "collective_timeout_s": 60.0,
    }
    one, plain = (
        steps_of(in_trainer(jobs.train, settings | {"megatron": options}, batches))
        for options in (BALANCED, {})
    )
    norms = [step["grad_norm"] for step in (one[0], plain[0])]
    assert abs(norms[0] - norms[1]) > 1e-2 * norms[1], "a balance changes the gradient"
    return {"settings": settings, "batches": batches, "steps": one}


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(CUT))
def test_a_balance_weighs_the_same_in_any_layout(
    layout: str, row_by_row: dict[str, Any], in_ranks: Callable[..., list[Any]]
) -> None:
    settings = row_by_row["settings"] | CUT[layout]
    settings["megatron"] = BALANCED | settings.get("megatron", {})
    found = in_ranks(jobs.train_on_rank, settings, row_by_row["batches"])
    assert_same_numbers(steps_of(found[0]), row_by_row["steps"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_continues_bit_for_bit_and_recomputing_changes_nothing(
    dtype: str, model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    settings = BASE | {"hf_checkpoint": model, "dtype": dtype, "max_tokens_per_gpu": 128}
    batches = [models.random_batch(models.VOCAB, seed=seed) for seed in range(3)]
    folder = str(tmp_path / "c")
    whole = in_trainer(jobs.train, settings, batches, None, (1, folder))
    again = settings | {
        "megatron": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    }
    resumed = in_trainer(jobs.train, again, batches[2:], folder)
    assert resumed["results"][0]["steps"] == whole["results"][2]["steps"]


def test_weights_come_back_from_a_megatron_checkpoint(
    model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    in_trainer(jobs.write_as_megatron_lm, {"hf_checkpoint": model}, str(tmp_path / "c"), "trap")
    other = models.save_random_model(tmp_path / "other", FAMILY, False, initializer_range=0.1)
    settings = {"hf_checkpoint": other, "megatron_load": str(tmp_path / "c")}
    in_trainer(jobs.export, settings, str(tmp_path / "back"))
    wanted = load_file(Path(model) / "model.safetensors")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


EP2 = {"expert_model_parallel_size": 2, "collective_timeout_s": 60.0}


def assert_same_numbers(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "entropy_loss", "grad_norm", "rollout/log_probs"):
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=3e-6), name


def steps_of(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for result in outcome["results"] for step in result["steps"]]


def test_two_ranks_with_half_of_the_experts_each_train_like_one(
    model: str,
    tmp_path: Path,
    in_trainer: Callable[..., Any],
    in_ranks: Callable[..., list[Any]],
) -> None:
    """And each goes on from the other's checkpoint, optimizer included."""
    settings = BASE | {"hf_checkpoint": model, "max_tokens_per_gpu": 96, "adam_eps": 1e-2}
    batches = [models.random_batch(models.VOCAB, rows=21, seed=seed) for seed in range(3)]
    folders = {name: str(tmp_path / name) for name in ("one", "two", "hf-one", "hf-two")}
    alone = in_trainer(
        jobs.train, settings, batches[:2], None, (1, folders["one"]), folders["hf-one"]
    )
    first, second = in_ranks(
        jobs.train_on_rank, settings | EP2, batches[:2], None, (1, folders["two"]),
        folders["hf-two"],
    )  # fmt: skip
    assert first["start"] == second["start"] == alone["start"], "one run in any layout"
    assert steps_of(first) == steps_of(second)
    assert_same_numbers(steps_of(first), steps_of(alone))
    ours, theirs = (load_file(Path(folders[f]) / "model.safetensors") for f in ("hf-two", "hf-one"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, atol=2e-5), name

    last = {
        (ranks, folder): steps_of(
            in_trainer(jobs.train, settings, batches[2:], folders[folder])
            if ranks == "one"
            else in_ranks(jobs.train_on_rank, settings | EP2, batches[2:], folders[folder])[0]
        )
        for ranks, folder in (("one", "one"), ("one", "two"), ("two", "one"))
    }
    for way in (("one", "two"), ("two", "one")):
        assert_same_numbers(last[way], last["one", "one"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_keeps_its_bits_from_one_rank_to_two_and_back(
    dtype: str,
    model: str,
    tmp_path: Path,
    in_trainer: Callable[..., Any],
    in_ranks: Callable[..., list[Any]],
) -> None:
    settings = BASE | {"hf_checkpoint": model, "dtype": dtype}
    seen = [models.random_batch(models.VOCAB, seed=seed) for seed in range(2)]
    one, two, back = (str(tmp_path / name) for name in ("one", "two", "back"))
    in_trainer(jobs.train, settings, seen[:1], None, (0, one))
    in_ranks(jobs.reshard_on_rank, settings | EP2, one, two, seen[1])
    in_trainer(jobs.reshard, settings, two, back, seen[1])
    wanted = in_trainer(jobs.stored_tensors, settings, one)
    assert any("experts" in name and "exp_avg_sq" in name for name in wanted)
    for folder in (two, back):
        found = in_trainer(jobs.stored_tensors, settings, folder)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (found[name] == tensor).all(), (folder, name)
