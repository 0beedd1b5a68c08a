"""Training against plain torch, and what may not change its result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.batching.types import TrainBatch

BASE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.0,
    "train_iters": 10,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 4096,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save_random_model(tmp_path_factory.mktemp("train") / "m", "qwen3", True)


def steps_of(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for result in outcome["results"] for step in result["steps"]]


@pytest.mark.parametrize(
    ("temperature", "per_token", "entropy_coef", "clip_grad"),
    [(1.0, False, 0.0, 1.0), (0.7, False, 0.01, 1e9), (1.3, True, 0.0, 0.05)],
)
def test_one_step_equals_plain_torch(
    model: str,
    tmp_path: Path,
    in_trainer: Callable[..., Any],
    temperature: float,
    per_token: bool,
    entropy_coef: float,
    clip_grad: float,
) -> None:
    batch = models.random_batch(models.VOCAB)
    want = models.reference_step(
        model,
        batch,
        temperature=temperature,
        lr=1e-3,
        per_token=per_token,
        entropy_coef=entropy_coef,
        clip_grad=clip_grad,
    )
    settings = BASE | {
        "hf_checkpoint": model,
        "rollout_temperature": temperature,
        "algorithm": AlgorithmSettings(
            calculate_per_token_loss=per_token, entropy_coef=entropy_coef
        ),
        "clip_grad": clip_grad,
    }
    out = in_trainer(jobs.train, settings, [batch], None, None, str(tmp_path / "after"))
    (step,) = steps_of(out)
    assert step["loss"] == pytest.approx(want.loss, rel=1e-5, abs=1e-6)
    assert step["entropy_loss"] == pytest.approx(want.entropy, rel=1e-5)
    assert step["grad_norm"] == pytest.approx(want.grad_norm, rel=1e-5)
    assert step["tokens"] == int(batch.loss_mask.sum())
    assert (step["skipped"], step["lr"], step["ppo_kl"]) == (False, 1e-3, 0.0)
    after = load_file(tmp_path / "after" / "model.safetensors")
    before = load_file(Path(model) / "model.safetensors")
    for name, tensor in after.items():
        # Adam's first step has the size lr whatever the gradient, so signs must agree.
        wrong = ((tensor - want.weights[name]).abs() > 1e-5).float().mean()
        assert wrong < 2e-3, name
        assert not torch.equal(tensor, before[name]), name


def test_micro_batches_chunks_and_row_order_change_nothing(
    model: str, in_trainer: Callable[..., Any]
) -> None:
    batch = models.random_batch(models.VOCAB, rows=24)
    shuffled = batch.select([*range(23, -1, -1)])
    settings = BASE | {"hf_checkpoint": model}
    variants: list[tuple[dict[str, Any], TrainBatch]] = [
        (settings, batch),
        (settings | {"max_tokens_per_gpu": 40}, batch),
        (settings | {"use_dynamic_batch_size": False, "micro_batch_size": 1}, batch),
        (settings | {"logits_chunk_tokens": 7}, batch),
        (settings | {"max_tokens_per_gpu": 64}, shuffled),
    ]
    found = [steps_of(in_trainer(jobs.train, s, [b]))[0] for s, b in variants]
    assert [step["micro_batches"] for step in found[:3]] == [1, pytest.approx(8, abs=2), 24]
    for step in found[1:]:
        for name in ("loss", "pg_loss", "entropy_loss", "grad_norm", "rollout/log_probs"):
            assert step[name] == pytest.approx(found[0][name], rel=2e-5, abs=1e-6), name
        for name in ("tokens", "train_rollout_logprob_abs_diff_max"):
            assert step[name] == pytest.approx(found[0][name], rel=1e-6)


def test_recomputed_old_log_probs_are_on_policy_in_other_micro_batches(
    shipped_model: str, in_trainer: Callable[..., Any]
) -> None:
    settings = BASE | {
        "hf_checkpoint": shipped_model,
        "algorithm": AlgorithmSettings(old_log_probs="recompute"),
        "max_tokens_per_gpu": 4096,
        "log_probs_max_tokens_per_gpu": 64,
    }
    (step,) = steps_of(in_trainer(jobs.train, settings, [models.random_batch(100)]))
    assert abs(step["ppo_kl"]) < 1e-6
    assert step["pg_clipfrac"] == 0.0
    assert step["micro_batches"] == 1


def test_later_steps_of_an_iteration_move_away_from_the_old_policy(
    model: str, in_trainer: Callable[..., Any]
) -> None:
    batch = models.random_batch(models.VOCAB, rows=32, steps=4)
    settings = BASE | {"hf_checkpoint": model, "lr": 3e-3}
    out = in_trainer(jobs.train, settings, [batch])
    steps = steps_of(out)
    assert abs(steps[0]["ppo_kl"]) < 1e-6
    assert all(abs(step["ppo_kl"]) > 1e-4 for step in steps[1:])
    assert any(step["pg_clipfrac"] > 0 for step in steps[1:])
    assert len({step["weights_digest"] for step in steps}) == 4
    assert out["results"][0]["seconds"]["log_probs"] > 0


def test_the_gap_to_the_engine_is_measured_on_trained_tokens_only(
    model: str, in_trainer: Callable[..., Any]
) -> None:
    batch = models.random_batch(models.VOCAB)
    settings = BASE | {"hf_checkpoint": model}
    (step,) = steps_of(in_trainer(jobs.train, settings, [batch]))
    own = models.load_model(model)
    mean_gap, largest, chosen_all = 0.0, 0.0, []
    with torch.no_grad():
        for row in range(batch.num_rows):
            ids = torch.from_numpy(batch.row_tokens(row).astype("int64"))
            count, where = int(batch.response_lengths[row]), batch.row_response(row)
            log_p = own(ids[None]).logits[0, -count - 1 : -1].log_softmax(-1)
            chosen = log_p.gather(1, ids[-count:, None])[:, 0]
            keep = torch.from_numpy(batch.loss_mask[where]).bool()
            rollout = torch.from_numpy(batch.rollout_log_probs[where])
            gaps = (chosen - rollout).abs()[keep].tolist()
            mean_gap += sum(gaps) / max(batch.denominators[row], 1) / models.trained_rollouts(batch)
            largest = max([largest, *gaps])
            chosen_all += chosen[keep].tolist()
    assert step["train_rollout_logprob_abs_diff"] == pytest.approx(mean_gap, rel=1e-5)
    assert step["train_rollout_logprob_abs_diff_max"] == pytest.approx(largest, rel=1e-5)
    assert step["rollout/log_probs"] == pytest.approx(sum(chosen_all) / len(chosen_all), rel=1e-5)


def test_the_same_inputs_give_the_same_bits(model: str, in_trainer: Callable[..., Any]) -> None:
    batches = [models.random_batch(models.VOCAB, seed=seed, steps=2) for seed in range(2)]
    settings = BASE | {"hf_checkpoint": model, "max_tokens_per_gpu": 64}
    runs = [in_trainer(jobs.train, settings, batches) for _ in range(2)]
    assert steps_of(runs[0]) == steps_of(runs[1])


def test_a_step_that_overflows_is_skipped_recorded_and_leaves_no_trace(
    model: str, in_trainer: Callable[..., Any]
) -> None:
    good = [models.random_batch(models.VOCAB, seed=seed) for seed in range(2)]
    bad = models.random_batch(models.VOCAB, seed=7, reward_scale=1e38)
    bad.rewards[:] = bad.rewards * 1e2  # float32 infinity
    settings = BASE | {"hf_checkpoint": model, "lr_decay_style": "linear"}
    with_bad = steps_of(in_trainer(jobs.train, settings, [good[0], bad, good[1]]))
    without = steps_of(in_trainer(jobs.train, settings, good))
    skipped = with_bad[1]
    assert skipped["skipped"]
    assert not math.isfinite(skipped["loss"])
    assert skipped["non_finite_rows"]
    assert skipped["weights_digest"] == with_bad[0]["weights_digest"]
    assert [with_bad[0], with_bad[2]] == without


def test_a_replay_repeats_a_recorded_skip(model: str, in_trainer: Callable[..., Any]) -> None:
    batches = [models.random_batch(models.VOCAB, seed=seed, steps=2) for seed in range(2)]
    settings = BASE | {"hf_checkpoint": model}
    skips = [(False, True), (False, False)]
    replay = steps_of(in_trainer(jobs.train, settings, batches, None, None, None, skips))
    assert [step["skipped"] for step in replay] == [False, True, False, False]
    assert replay[1]["weights_digest"] == replay[0]["weights_digest"]
    assert replay[2]["weights_digest"] != replay[1]["weights_digest"]


def test_the_learning_rate_follows_megatrons_schedule(
    model: str, in_trainer: Callable[..., Any]
) -> None:
    settings = BASE | {
        "hf_checkpoint": model,
        "train_iters": 6,
        "lr_warmup_iters": 2,
        "megatron": {"lr_decay_style": "linear", "min_lr": 1e-4},
    }
    batch = models.random_batch(models.VOCAB, rows=12, steps=6)
    steps = steps_of(in_trainer(jobs.train, settings, [batch]))
    want = [0.0, 5e-4, 1e-3, 1e-3 - 0.225e-3, 1e-3 - 0.45e-3, 1e-3 - 0.675e-3]
    assert [step["lr"] for step in steps] == pytest.approx(want)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"lr_decay_style": "linear", "lr_decay_iters": 4}, [10, 7.5, 5, 2.5, 0, 0]),
        ({"lr_warmup_iters": 2, "lr_warmup_init": 2e-4}, [2, 6, 10, 10, 10, 10]),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2, "lr_wsd_decay_style": "linear"},
            [10, 10, 10, 10, 10, 5],
        ),
    ],
)
def test_each_number_of_the_schedule_counts(
    model: str, in_trainer: Callable[..., Any], options: dict[str, Any], want: list[float]
) -> None:
    """Learning rates of six steps, in units of 1e-4."""
    settings = BASE | {"hf_checkpoint": model, "train_iters": 6, "megatron": options}
    batch = models.random_batch(models.VOCAB, rows=12, steps=6)
    steps = steps_of(in_trainer(jobs.train, settings, [batch]))
    assert [step["lr"] * 1e4 for step in steps] == pytest.approx(want)


@pytest.mark.parametrize(
    "options",
    [{"weight_decay": 0.5}, {"adam_beta1": 0.5}, {"adam_beta2": 0.5}, {"adam_eps": 1e-2}],
    ids=lambda options: next(iter(options)),
)
def test_each_number_of_the_optimizer_changes_the_second_step(
    model: str, in_trainer: Callable[..., Any], options: dict[str, Any]
) -> None:
    """The first step of Adam does not depend on its betas."""
    batch = models.random_batch(models.VOCAB, steps=2)
    base = steps_of(in_trainer(jobs.train, BASE | {"hf_checkpoint": model}, [batch]))
    settings = BASE | {"hf_checkpoint": model, "megatron": options}
    steps = steps_of(in_trainer(jobs.train, settings, [batch]))
    assert steps[0]["grad_norm"] == base[0]["grad_norm"]
    assert steps[1]["weights_digest"] != base[1]["weights_digest"]


@pytest.mark.parametrize(
    "options",
    [
        {"recompute_granularity": "selective"},
        *({"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": 1}
          for method in ("uniform", "block")),
    ],
)  # fmt: skip
def test_layers_that_are_computed_again_give_the_same_weights(
    model: str, in_trainer: Callable[..., Any], options: dict[str, Any]
) -> None:
    batch = models.random_batch(models.VOCAB, steps=2)
    kept = steps_of(in_trainer(jobs.train, BASE | {"hf_checkpoint": model}, [batch]))
    settings = BASE | {"hf_checkpoint": model, "megatron": options}
    again = steps_of(in_trainer(jobs.train, settings, [batch]))
    assert [step["weights_digest"] for step in again] == [step["weights_digest"] for step in kept]


def test_bf16_trains_close_to_fp32(model: str, in_trainer: Callable[..., Any]) -> None:
    batch = models.random_batch(models.VOCAB)
    full = steps_of(in_trainer(jobs.train, BASE | {"hf_checkpoint": model}, [batch]))[0]
    settings = BASE | {"hf_checkpoint": model, "dtype": "bfloat16"}
    half = steps_of(in_trainer(jobs.train, settings, [batch]))[0]
    assert half["loss"] == pytest.approx(full["loss"], rel=0.1, abs=0.02)
    assert half["grad_norm"] == pytest.approx(full["grad_norm"], rel=0.1)


def test_a_gradient_can_be_looked_at_without_a_step(
    model: str, in_trainer: Callable[..., Any]
) -> None:
    batch = models.random_batch(models.VOCAB, rows=16)
    rewards = np.zeros(16)
    rewards[:3] = (1.0, -1.0, 1.0)
    three = replace(batch, rewards=rewards)
    doubled = replace(batch, rewards=2 * batch.rewards)
    found = in_trainer(jobs.probes, BASE | {"hf_checkpoint": model}, [batch, doubled, three])
    (step,) = found["trained"]["steps"]
    plain, twice, few = found["probes"]
    assert plain["loss"] == pytest.approx(step["loss"], abs=1e-7)
    assert plain["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-6)
    assert np.linalg.norm(plain["gradient"]) == pytest.approx(step["grad_norm"], rel=1e-5)
    np.testing.assert_allclose(twice["gradient"], 2 * plain["gradient"], rtol=1e-3, atol=1e-6)
    assert twice["effective_samples"] == pytest.approx(plain["effective_samples"])
    shares = batch.mask_sums[:3] / batch.denominators[:3]  # rows of one rollout share its weight
    assert few["effective_samples"] == pytest.approx(shares.sum() ** 2 / (shares**2).sum())
