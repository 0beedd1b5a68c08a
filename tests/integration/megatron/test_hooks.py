"""The user's own functions in training, against the built-in way with the same formula."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import models
import numpy as np
import pytest
import torch

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.batching.types import TrainBatch
from slime_core.errors import PluginError, TrainerError

BASE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.0,
    "train_iters": 10,
    "rollout_temperature": 0.8,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 64,
    "collective_timeout_s": 60.0,
    "args": SimpleNamespace(rollout_temperature=0.8, eps_clip=0.2, factor=0.5, tis_clip=1.5),
}
LOSS = {"loss_type": "custom_loss"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save_random_model(tmp_path_factory.mktemp("hooks") / "m", "qwen3", True)


@pytest.fixture(scope="module")
def batch(model: str) -> TrainBatch:
    """Two steps; engine log-probs near the model's own."""
    made = models.random_batch(models.VOCAB, steps=2)
    own = models.load_model(model)
    with torch.no_grad():
        rows = [models.token_log_probs(own, made, row) for row in range(made.num_rows)]
    noise = np.random.default_rng(1).normal(0, 0.3, len(made.loss_mask))
    return replace(made, rollout_log_probs=(torch.cat(rows).numpy() + noise).astype(np.float32))


def hook(name: str) -> str:
    return f"{Path(__file__).parent / 'hooks_given.py'}:{name}"


@pytest.fixture
def steps(model: str, in_trainer: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    def run(batch: TrainBatch, lr: float = 1e-2, **algorithm: Any) -> list[dict[str, Any]]:
        chosen = BASE | {"hf_checkpoint": model, "algorithm": AlgorithmSettings(**algorithm)}
        (result,) = in_trainer(jobs.train, chosen | {"lr": lr}, [batch])["results"]
        return result["steps"]

    return run


def assert_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """After the first step, Adam has made much of the last bits of small gradients."""
    for mine, other, rel in zip(ours, theirs, (2e-5, 2e-3), strict=True):
        for name in ("loss", "grad_norm", "rollout/log_probs", "rollout/rollout_log_probs"):
            assert mine[name] == pytest.approx(other[name], rel=rel, abs=2e-6), name


def test_a_custom_loss_with_the_policy_loss_in_it_is_the_policy_loss(
    batch: TrainBatch, steps: Callable[..., list[dict[str, Any]]]
) -> None:
    ours = steps(batch, custom_loss_function_path=hook("grpo_from_logits"), **LOSS)
    plain = steps(batch)
    assert_equal(ours, plain)
    assert plain[1]["pg_clipfrac"] > 0, "the clip must matter for this to mean anything"
    assert ours[0]["my_ratio"] == pytest.approx(
        models.trained_rollouts(batch.select(batch.steps[0])) / len(set(batch.rollout_ids[:12])),
        rel=1e-5,
    )


def test_custom_advantages_see_train_metadata_and_are_whitened_like_others(
    batch: TrainBatch, steps: Callable[..., list[dict[str, Any]]]
) -> None:
    weights = np.random.default_rng(3).uniform(0.5, 2, batch.num_rows)
    tagged = replace(batch, metadata=tuple({"weight": float(w)} for w in weights))
    weighed = replace(batch, rewards=batch.rewards * weights * 0.5)
    path = {"custom_advantage_function_path": hook("weighted_by_metadata")}
    assert_equal(steps(tagged, **path), steps(weighed))
    white = {"normalize_advantages": True}
    assert_equal(steps(tagged, **path, **white), steps(weighed, **white))


def test_a_custom_correction_weighs_and_leaves_out(
    batch: TrainBatch, steps: Callable[..., list[dict[str, Any]]]
) -> None:
    ours = steps(batch, use_tis=True, custom_tis_function_path=hook("clipped_and_vetoed"))
    plain = steps(batch, use_tis=True, tis_clip=1.5, rs_veto_threshold=0.5)
    assert_equal(ours, plain)
    assert 0 < plain[0]["rs_rejected"] < 1
    assert ours[0]["my_weight"] == pytest.approx(plain[0]["tis"], rel=1e-5)


def test_the_result_says_which_functions_took_part(
    model: str, batch: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    """A ledger keeps it, so a function that was edited in mid run can be told."""
    path = hook("constant_length")
    algorithm = AlgorithmSettings(custom_pg_loss_reducer_function_path=path)
    chosen = BASE | {"hf_checkpoint": model, "algorithm": algorithm}
    (result,) = in_trainer(jobs.train, chosen, [batch])["results"]
    source = (Path(__file__).parent / "hooks_given.py").read_bytes()
    name = f"custom_pg_loss_reducer_function_path {path}"
    assert result["hooks"] == {name: hashlib.sha256(source).hexdigest()}


def test_a_custom_reducer_weighs_tokens(
    batch: TrainBatch, steps: Callable[..., list[dict[str, Any]]]
) -> None:
    ours = steps(batch, custom_pg_loss_reducer_function_path=hook("constant_length"))
    plain = steps(batch, advantage_estimator="dr_grpo", max_response_len=20)
    assert_equal(ours, plain)
    assert abs(plain[0]["loss"] - steps(batch)[0]["loss"]) > 1e-3


def test_functions_are_called_with_megatrons_objects_at_their_moments(
    model: str, batch: TrainBatch, in_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    algorithm = AlgorithmSettings(
        use_kl_loss=True,
        kl_loss_coef=0.1,
        custom_megatron_init_path=hook("at_the_start"),
        custom_megatron_before_log_prob_hook_path=hook("before_log_probs"),
        custom_megatron_before_train_step_hook_path=hook("before_a_step"),
    )
    chosen = BASE | {"hf_checkpoint": model, "algorithm": algorithm, "lr": 1e-2}
    chosen |= {"args": SimpleNamespace(notes=str(notes)), "lr_decay_style": "constant"}
    results = in_trainer(jobs.train, chosen, [batch, batch])["results"]
    first, *rest = notes.read_text(encoding="utf-8").splitlines()
    assert first == "init of 1"
    assert rest == [
        line
        for k in (0, 1)
        for line in (
            "log-probs 'ref_' of ['DistributedDataParallel']",
            "log-probs '' of ['DistributedDataParallel']",
            f"step 0 of iteration {k} at 0.01",
            f"step 1 of iteration {k} at 0.01",
        )
    ]
    rates = [step["lr"] for result in results for step in result["steps"]]
    assert rates == pytest.approx([1e-2, 1e-3, 1e-2, 1e-3])


HOOKED: dict[str, dict[str, Any]] = {
    "loss": LOSS | {"custom_loss_function_path": hook("grpo_from_logits")},
    "correction": {
        "use_tis": True,
        "custom_tis_function_path": hook("clipped_and_vetoed"),
        "custom_pg_loss_reducer_function_path": hook("constant_length"),
    },
}


@pytest.mark.parametrize("name", sorted(HOOKED))
def test_two_ranks_agree_also_where_one_has_nothing_but_padding(
    model: str,
    name: str,
    batch: TrainBatch,
    in_trainer: Callable[..., Any],
    in_ranks: Callable[..., list[Any]],
) -> None:
    uneven = replace(batch, steps=((5,), (6, 7, 8, 9, 10)))
    algorithm = AlgorithmSettings(**HOOKED[name])
    chosen = BASE | {"hf_checkpoint": model, "algorithm": algorithm, "adam_eps": 1e-2}
    (alone,) = in_trainer(jobs.train, chosen, [uneven])["results"]
    pair = [one["results"][0] for one in in_ranks(jobs.train_on_rank, chosen, [uneven])]
    assert pair[0]["steps"] == pair[1]["steps"]
    own = "my_ratio" if name == "loss" else "my_weight"
    for ours, theirs in zip(pair[0]["steps"], alone["steps"], strict=True):
        assert ours.keys() == theirs.keys()
        for number in ("loss", "grad_norm", own, "rollout/log_probs"):
            assert ours[number] == pytest.approx(theirs[number], rel=1e-4, abs=5e-6), number


@pytest.mark.parametrize(
    ("path", "more", "error", "words"),
    [
        (
            "custom_advantage_function_path=too_short",
            {},
            PluginError,
            "advantages of row 0 must be a tensor of its",
        ),
        ("custom_advantage_function_path=broken", {}, PluginError, "broken raised KeyError"),
        (
            "custom_loss_function_path=sometimes_silent",
            LOSS,
            TrainerError,
            "report different numbers, so they cannot be added up: odd",
        ),
        (
            "custom_advantage_function_path=constant_length",
            {},
            PluginError,
            r"it is called as \(args, rollout_data\)",
        ),
    ],
)
def test_a_function_that_does_not_fit_is_named(
    batch: TrainBatch,
    steps: Callable[..., list[dict[str, Any]]],
    path: str,
    more: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    flag, name = path.split("=")
    with pytest.raises(error, match=words):
        steps(batch, **{flag: hook(name)}, **more)


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_weights_that_a_function_spoils_are_not_recorded(
    batch: TrainBatch, steps: Callable[..., list[dict[str, Any]]], number: str
) -> None:
    """The loss is not finite either, but a skipped step leaves the weights as they are."""
    path = hook(f"spoils_a_weight_with_{number}")
    with pytest.raises(
        TrainerError, match=r"1 of the actor's weights hold NaN or Inf.*learning rate"
    ):
        steps(batch, custom_megatron_before_train_step_hook_path=path)


@pytest.mark.parametrize("per_token", [False, True])
def test_the_supervised_loss_is_minus_the_mean_log_prob(
    model: str,
    batch: TrainBatch,
    steps: Callable[..., list[dict[str, Any]]],
    per_token: bool,
) -> None:
    """Rows come from a file of answers: no engine has given them log-probs."""
    unknown = np.full_like(batch.rollout_log_probs, np.nan)
    answers = replace(batch, rollout_log_probs=unknown, steps=(tuple(range(24)),))
    (step,) = steps(
        answers,
        loss_type="sft_loss",
        disable_compute_advantages_and_returns=True,
        calculate_per_token_loss=per_token,
    )
    own = models.load_model(model).double()
    rollouts, tokens = len(set(batch.rollout_ids.tolist())), int(batch.loss_mask.sum())
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(batch.num_rows):
        keep = torch.from_numpy(batch.loss_mask[batch.row_response(row)]).bool()
        weight = 1 / tokens if per_token else 1 / max(batch.denominators[row], 1) / rollouts
        ids = torch.from_numpy(batch.row_tokens(row).astype(np.int64))
        count = int(batch.response_lengths[row])
        log_p = (own(ids[None]).logits[0, -count - 1 : -1] / 0.8).log_softmax(-1)
        loss = loss - weight * log_p.gather(1, ids[-count:, None])[:, 0][keep].sum()
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in own.parameters() if p.grad is not None])
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert step["grad_norm"] == pytest.approx(norm.sum().sqrt().item(), rel=1e-4)
    assert not {"rollout/advantages", "rollout/rollout_log_probs"} & step.keys()
    assert not step["skipped"]
