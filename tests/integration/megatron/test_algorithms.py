"""What each algorithm setting does to a training step: right numbers, and never nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jobs
import models
import numpy as np
import pytest
import torch
from algorithm_runs import OPD, PLUS, PPO, sample_weights, settings, steps_of

from slime_core.batching.types import TrainBatch
from slime_core.errors import DataError
from slime_core.tracking.registry import find

# Base settings, one change, and a number that must differ because of it.
EFFECTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(
        ({}, {"advantage_estimator": name}, "grad_norm")
        for name in ("gspo", "cispo", "sapo", "gmpo", "gpg", "ipo")
    ),
    ({}, {"advantage_estimator": "dr_grpo", "max_response_len": 20}, "loss"),
    ({}, {"normalize_advantages": True}, "loss"),
    ({}, {"eps_clip": 0.001}, "pg_clipfrac"),
    ({}, {"eps_clip_high": 0.001}, "pg_clipfrac"),
    ({}, {"eps_clip_c": 1.0001}, "loss"),
    ({}, {"entropy_coef": 0.1}, "loss"),
    ({}, {"calculate_per_token_loss": True}, "loss"),
    (
        {"advantage_estimator": "sapo"},
        {"sapo_tau_pos": 3.0},
        "grad_norm",
    ),
    ({"advantage_estimator": "sapo"}, {"sapo_tau_neg": 3.0}, "grad_norm"),
    ({"use_kl_loss": True}, {"kl_loss_coef": 0.5}, "loss"),
    ({"use_kl_loss": True}, {"kl_loss_type": "k3"}, "kl_loss"),
    (
        {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k3"},
        {"use_unbiased_kl": True},
        "grad_norm",
    ),
    ({}, {"use_rollout_logprobs": True}, "ppo_kl"),
    ({}, {"use_tis": True}, "loss"),
    ({"use_tis": True}, {"tis_clip": 1.1}, "tis"),
    ({"use_tis": True}, {"tis_clip_low": 0.9}, "tis"),
    ({"use_tis": True}, {"tis_level": "sequence"}, "tis"),
    ({"use_tis": True}, {"tis_level": "geometric"}, "tis"),
    ({"use_tis": True, "tis_clip": 1.1}, {"tis_mode": "mask"}, "tis"),
    ({}, {"use_rs": True, "rs_upper_bound": 1.2}, "loss"),
    ({"use_rs": True}, {"rs_upper_bound": 1.2}, "rs_rejected"),
    ({"use_rs": True}, {"rs_lower_bound": 0.9}, "rs_rejected"),
    ({"use_rs": True}, {"rs_level": "sequence"}, "rs_rejected"),
    ({"use_rs": True}, {"rs_estimator": "k3", "rs_upper_bound": 0.02}, "rs_rejected"),
    (
        {"use_rs": True, "rs_estimator": "k3", "rs_upper_bound": 0.1},
        {"rs_level": "max"},
        "rs_rejected",
    ),
    ({"use_tis": True, "tis_clip": 1.1}, {"tis_batch_normalize": True}, "loss"),
    ({"advantage_estimator": "ipo"}, {"ipo_threshold": 1e-4}, "pg_clipfrac"),
    ({"advantage_estimator": "ipo"}, {"ipo_kl_tau": 0.1}, "loss"),
    ({"use_tis": True}, {"rs_veto_threshold": 0.6}, "loss"),
    ({"use_rollout_logprobs": True}, {"use_opsm": True}, "loss"),
    ({"use_rollout_logprobs": True, "use_opsm": True}, {"opsm_delta": 0.2}, "opsm_clipfrac"),
    (PLUS, {"gamma": 0.5}, "loss"),
    (PLUS, {"kl_coef": 0.5}, "loss"),
    (PLUS | {"kl_coef": 0.5}, {"kl_loss_type": "k2"}, "loss"),
    (
        PLUS | {"kl_coef": 0.5},
        {"advantage_estimator": "reinforce_plus_plus_baseline"},
        "loss",
    ),
    ({}, OPD, "loss"),
    (OPD, {"opd_kl_coef": 0.5}, "loss"),
    (PPO, {"lambd": 0.5}, "loss"),
    (PPO, {"gamma": 0.5}, "loss"),
    (PPO, {"kl_coef": 0.5}, "loss"),
    (PPO, {"value_clip": 0.01}, "value_clipfrac"),
    (PPO, {"critic_lr": 3e-3}, "critic_lr"),
    (PPO, {"num_critic_only_steps": 1}, "loss"),
]


@pytest.fixture(scope="module")
def ran(
    model: str, reference: str, two_steps: TrainBatch, in_trainer: Callable[..., Any]
) -> Callable[..., dict[str, Any]]:
    """The second step of an iteration under some settings; each settings run once."""
    found: dict[str, dict[str, Any]] = {}

    def run(**algorithm: Any) -> dict[str, Any]:
        key = repr(sorted(algorithm.items()))
        if key not in found:
            if algorithm.get("use_opd"):
                algorithm["opd_teacher_load"] = reference
            chosen = settings(model, ref_load=reference, **algorithm)
            chosen |= {"lr": 1e-2, "max_tokens_per_gpu": 4096}
            found[key] = steps_of(in_trainer(jobs.train, chosen, [two_steps]))[1]
        return found[key]

    return run


@pytest.mark.parametrize(
    ("base", "change", "name"),
    EFFECTS,
    ids=[f"{next(iter(c))}-{n}-{i}" for i, (_, c, n) in enumerate(EFFECTS)],
)
def test_every_setting_changes_its_number(
    ran: Callable[..., dict[str, Any]], base: dict[str, Any], change: dict[str, Any], name: str
) -> None:
    before, after = ran(**base), ran(**base | change)
    assert math.isfinite(after[name])
    assert after[name] != pytest.approx(before.get(name, math.nan), rel=1e-4)


def test_every_reported_number_is_explained(ran: Callable[..., dict[str, Any]]) -> None:
    everything = [
        {
            **{"use_tis": True, "tis_batch_normalize": True, "use_rs": True},
            **{"get_mismatch_metrics": True, "use_kl_loss": True},
        },
        {"use_rollout_logprobs": True, "use_opsm": True},
        PPO | {"kl_coef": 0.5},
        OPD,
    ]
    text = {"skipped", "weights_digest", "non_finite_rows"}
    for chosen in everything:
        for name in ran(**chosen).keys() - text:
            metric = find(name if "/" in name else f"train/{name}")
            assert metric is not None and "{" not in metric.name, name


def test_the_mean_weight_of_a_step_is_one_where_it_is_asked_for(
    model: str, two_steps: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    """Without clipping of the policy ratio the loss of each step is linear in the weights."""
    tis = {"use_tis": True, "tis_clip": 1.1}
    chosen = [settings(model, **tis, tis_batch_normalize=on) | {"lr": 0.0} for on in (False, True)]
    before, after = (steps_of(in_trainer(jobs.train, c, [two_steps])) for c in chosen)
    for plain, scaled, rows in zip(before, after, two_steps.steps, strict=True):
        step = two_steps.select(rows)
        own = models.load_model(model).double()
        with torch.no_grad():
            log_p = torch.cat([models.token_log_probs(own, step, r) for r in range(step.num_rows)])
        ratio = (log_p - torch.from_numpy(step.rollout_log_probs)).exp().clamp(0, 1.1)
        mean = ratio[torch.from_numpy(step.loss_mask == 1)].mean().item()
        assert scaled["tis_scale"] == pytest.approx(1 / mean, rel=1e-4)
        assert scaled["loss"] == pytest.approx(plain["loss"] / mean, rel=1e-4)
        assert scaled["tis"] == pytest.approx(plain["tis"], rel=1e-5)


def test_true_on_policy_mode_stops_where_engine_and_trainer_differ(
    model: str, batch: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    own = models.load_model(model)
    with torch.no_grad():
        log_p = torch.cat([models.token_log_probs(own, batch, r) for r in range(batch.num_rows)])
    exact = replace(batch, rollout_log_probs=log_p.numpy())
    mode = settings(model, true_on_policy_mode=True) | {"on_policy_tolerance": 2e-5}
    (step,) = steps_of(in_trainer(jobs.train, mode, [exact]))
    (plain,) = steps_of(in_trainer(jobs.train, settings(model), [exact]))
    assert step["weights_digest"] == plain["weights_digest"]
    moved = log_p.numpy().copy()
    moved[np.flatnonzero(batch.loss_mask)[7]] += 0.25
    words = r"differ by up to 0\.25 nats, and 2e-05 are allowed"
    with pytest.raises(DataError, match=words):
        in_trainer(jobs.train, mode, [replace(batch, rollout_log_probs=moved)])
    unknown = np.where(batch.loss_mask == 1, np.float32(np.nan), log_p.numpy())
    with pytest.raises(DataError, match="differ by up to nan"):
        in_trainer(jobs.train, mode, [replace(batch, rollout_log_probs=unknown)])


def test_mismatch_metrics_are_reported_where_asked_for(ran: Callable[..., dict[str, Any]]) -> None:
    names = {"mis_kl", "mis_k3_kl", "mis_chi2_token", "mis_chi2_seq", "mis_ppl_ratio"}
    assert names <= ran(get_mismatch_metrics=True).keys()
    assert not names & ran().keys()


def test_rows_too_long_for_a_micro_batch_are_refused_cut_or_left_out(
    model: str, batch: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    own = {"rollout_ids": np.arange(24), "denominators": batch.mask_sums.astype(np.float64)}
    batch = replace(batch, **own)  # each row is a rollout
    limit = int(np.sort(batch.lengths)[-3])
    longer = batch.lengths > limit
    tight = settings(model) | {"max_tokens_per_gpu": limit}
    with pytest.raises(DataError, match=f"a micro-batch holds {limit}: raise --max-tokens-per-gpu"):
        in_trainer(jobs.train, tight, [batch])
    (cut,) = steps_of(in_trainer(jobs.train, tight | {"overlong_policy": "truncate"}, [batch]))
    (left,) = steps_of(in_trainer(jobs.train, tight | {"overlong_policy": "drop"}, [batch]))
    assert cut["overlong_truncated_rows"] == left["overlong_dropped_rows"] == longer.sum() > 0
    assert cut["overlong_truncated_tokens"] == (batch.lengths - limit)[longer].sum()
    assert left["tokens"] == batch.mask_sums[~longer].sum() < cut["tokens"] < batch.loss_mask.sum()
    (without,) = steps_of(
        in_trainer(jobs.train, settings(model), [batch.select(np.flatnonzero(~longer))])
    )
    assert left["loss"] == pytest.approx(without["loss"], rel=1e-5, abs=1e-6)
    for step in (cut, left):
        found = {name: find(f"train/{name}") for name in step if name.startswith("overlong")}
        assert len(found) == 3 and all(m and "{" not in m.name for m in found.values())


@pytest.mark.parametrize("unbiased", [False, True])
def test_the_kl_loss_equals_plain_torch(
    model: str,
    reference: str,
    batch: TrainBatch,
    in_trainer: Callable[..., Any],
    unbiased: bool,
) -> None:
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"}
    chosen = settings(model, ref_load=reference, use_unbiased_kl=unbiased, **kl)
    (step,) = steps_of(in_trainer(jobs.train, chosen, [batch]))
    own, other = models.load_model(model).double(), models.load_model(reference).double()
    kl_sum, loss = 0.0, torch.zeros((), dtype=torch.float64)
    for row, weight in enumerate(sample_weights(batch)):
        keep = torch.from_numpy(batch.loss_mask[batch.row_response(row)]).bool()
        log_p = models.token_log_probs(own, batch, row)[keep]
        gap = log_p - models.token_log_probs(other, batch, row)[keep].detach()
        divergence = (-gap).exp() - 1 + gap
        ratio = (log_p - log_p.detach()).exp()
        weighed = ratio * divergence if unbiased else divergence
        loss = loss + weight * (0.3 * weighed - ratio * batch.rewards[row]).sum()
        kl_sum += weight * divergence.sum().item()
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in own.parameters() if p.grad is not None])
    share = len(set(batch.rollout_ids.tolist())) / models.trained_rollouts(batch)
    assert step["kl_loss"] == pytest.approx(kl_sum * share, rel=1e-4)
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert step["grad_norm"] == pytest.approx(norm.sum().sqrt().item(), rel=1e-5)


def test_distillation_pulls_each_token_by_its_log_ratio(
    model: str, reference: str, batch: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    chosen = settings(model, use_opd=True, opd_kl_coef=0.5, opd_teacher_load=reference)
    (step,) = steps_of(in_trainer(jobs.train, chosen, [batch]))
    own, teacher = models.load_model(model).double(), models.load_model(reference).double()
    loss, gaps = 0.0, []
    with torch.no_grad():
        for row, weight in enumerate(sample_weights(batch)):
            keep = torch.from_numpy(batch.loss_mask[batch.row_response(row)]).bool()
            log_p = models.token_log_probs(own, batch, row)[keep]
            gap = log_p - models.token_log_probs(teacher, batch, row)[keep]
            loss -= weight * (batch.rewards[row] - 0.5 * gap).sum().item()
            gaps += gap.tolist()
    assert step["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert step["rollout/opd_reverse_kl"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)


def test_the_gap_to_the_engine_is_the_trainers_also_where_the_ratio_refers_to_the_engine(
    model: str, batch: TrainBatch, two_steps: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    name = "train_rollout_logprob_abs_diff"
    for data in (batch, two_steps):
        plain = steps_of(in_trainer(jobs.train, settings(model), [data]))
        engine = settings(model, use_rollout_logprobs=True, get_mismatch_metrics=True)
        found = steps_of(in_trainer(jobs.train, engine, [data]))
        for ours, theirs in zip(found, plain, strict=True):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
            assert ours[name] > 0.1
            assert abs(ours["ppo_kl"]) > 1e-3


def test_the_entropy_of_right_answers_is_theirs_alone(
    model: str, batch: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    right = [0, 5, 6, 17]
    raw = np.full(batch.num_rows, 0.5)
    raw[right] = 1.0
    own, entropies = models.load_model(model).double(), []
    with torch.no_grad():
        for row in right:
            ids = torch.from_numpy(batch.row_tokens(row).astype(np.int64))
            count = int(batch.response_lengths[row])
            log_p = own(ids[None]).logits[0, -count - 1 : -1].log_softmax(-1)
            keep = torch.from_numpy(batch.loss_mask[batch.row_response(row)]).bool()
            entropies += (-(log_p.exp() * log_p).sum(-1))[keep].tolist()
    (step,) = steps_of(in_trainer(jobs.train, settings(model), [replace(batch, raw_rewards=raw)]))
    expected = sum(entropies) / len(entropies)
    assert step["rollout/correct_entropy"] == pytest.approx(expected, rel=1e-5)
    assert step["rollout/entropy"] != pytest.approx(expected, rel=1e-3)
    wrong = replace(batch, raw_rewards=np.zeros(batch.num_rows))
    (none,) = steps_of(in_trainer(jobs.train, settings(model), [wrong]))
    assert "rollout/correct_entropy" not in none
