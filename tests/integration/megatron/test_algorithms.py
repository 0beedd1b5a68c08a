"""What each algorithm setting does to a training step: right numbers, and never nothing."""

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

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.batching.types import TrainBatch
from slime_core.errors import DataError
from slime_core.tracking.registry import find

BASE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.0,
    "train_iters": 10,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 64,
    "collective_timeout_s": 60.0,
}
PLUS = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}
OPD = {"use_opd": True, "opd_teacher_load": "teacher"}  # the fixture knows the folder
PPO = {"advantage_estimator": "ppo", "critic_lr": 2e-3}


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


def near_policy(model: str, batch: TrainBatch) -> TrainBatch:
    own = models.load_model(model)
    with torch.no_grad():
        rows = [models.token_log_probs(own, batch, row) for row in range(batch.num_rows)]
    noise = np.random.default_rng(1).normal(0, 0.3, len(batch.loss_mask))
    engine = (torch.cat(rows).numpy() + noise).astype(np.float32)
    return replace(batch, rollout_log_probs=engine)


def settings(model: str, **algorithm: Any) -> dict[str, Any]:
    return BASE | {"hf_checkpoint": model, "algorithm": AlgorithmSettings(**algorithm)}


def steps_of(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for result in outcome["results"] for step in result["steps"]]


def sample_weights(batch: TrainBatch) -> list[float]:
    """The weight of each token of a row in the loss."""
    rollouts = len(set(batch.rollout_ids.tolist()))
    return [1 / max(d, 1) / rollouts for d in batch.denominators]


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


def test_a_fresh_critic_learns_from_its_head(
    model: str, batch: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    """With V = 0 everywhere and gamma = lambda = 1 the return of each token is the reward."""
    (step,) = steps_of(in_trainer(jobs.train, settings(model, **PPO), [batch]))
    own = models.load_model(model).double()
    loss, head = 0.0, torch.zeros(65, dtype=torch.float64)
    with torch.no_grad():
        for row, weight in enumerate(sample_weights(batch)):
            ids = torch.from_numpy(batch.row_tokens(row).astype(np.int64))
            count = int(batch.response_lengths[row])
            hidden = own.model(ids[None]).last_hidden_state[0, -count - 1 : -1]  # type: ignore[operator]
            keep = torch.from_numpy(batch.loss_mask[batch.row_response(row)]).bool()
            inputs = torch.cat([hidden, torch.ones(count, 1)], dim=1)[keep]
            head += (weight * -2 * batch.rewards[row] * inputs).sum(0)
            loss += weight * batch.rewards[row] ** 2 * int(keep.sum())
    assert step["value_loss"] == pytest.approx(loss, rel=1e-5)
    assert step["critic_grad_norm"] == pytest.approx(head.norm().item(), rel=1e-4)
    assert (step["critic_lr"], step["lr"], step["rollout/values"]) == (2e-3, 1e-3, 0.0)


def test_the_critic_approaches_the_returns(
    model: str, batch: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    chosen = settings(model, value_clip=10.0, **PPO) | {"lr": 0.0}
    steps = steps_of(in_trainer(jobs.train, chosen, [batch] * 8))
    losses = [step["value_loss"] for step in steps]
    assert losses[-1] < 0.6 * losses[0]
    assert losses == sorted(losses, reverse=True)


def test_warm_up_trains_the_critic_alone(
    model: str, batch: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    chosen = settings(model, num_critic_only_steps=2, **PPO)
    steps = steps_of(in_trainer(jobs.train, chosen, [batch] * 3))
    pairs = [step["weights_digest"].split() for step in steps]
    actors, critics = zip(*pairs, strict=True)
    assert actors[0] == actors[1] != actors[2]
    assert len(set(critics)) == 3
    assert ["pg_loss" in step for step in steps] == [False, False, True]
    assert not any(step["skipped"] for step in steps)


def test_a_bad_step_leaves_policy_and_critic_alone(
    model: str, batch: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    bad = replace(batch, rewards=batch.rewards * 1e40)
    good, skipped, later = steps_of(
        in_trainer(jobs.train, settings(model, **PPO), [batch, bad, batch])
    )
    assert skipped["skipped"] and skipped["non_finite_rows"]
    assert skipped["weights_digest"] == good["weights_digest"]
    forced = steps_of(
        in_trainer(
            jobs.train,
            settings(model, **PPO),
            [batch, batch, batch],
            None,
            None,
            None,
            [(False,), (True,), (False,)],
        )
    )
    assert [forced[0], forced[2]] == [good, later]


def test_the_reference_is_the_start_and_follows_the_policy_at_its_interval(
    model: str, batch: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    kl = {"use_kl_loss": True, "kl_loss_type": "k2"}
    fixed = steps_of(in_trainer(jobs.train, settings(model, **kl), [batch] * 4))
    moved = steps_of(
        in_trainer(jobs.train, settings(model, ref_update_interval=2, **kl), [batch] * 4)
    )
    assert fixed[0]["kl_loss"] < 1e-9
    assert 1e-6 < fixed[1]["kl_loss"] < fixed[2]["kl_loss"] < fixed[3]["kl_loss"]
    assert [step["kl_loss"] for step in moved[:2]] == [step["kl_loss"] for step in fixed[:2]]
    assert moved[2]["kl_loss"] < 1e-9 and moved[3]["kl_loss"] > 1e-6
    # A metric alone changes no weight.
    plain = steps_of(in_trainer(jobs.train, settings(model), [batch] * 4))
    assert [s["weights_digest"] for s in fixed] == [s["weights_digest"] for s in plain]


def test_the_ratio_refers_to_the_old_actor_until_it_is_renewed(
    model: str, batch: TrainBatch, in_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    kept = {"keep_old_actor": True, "old_actor_update_interval": 2}
    mean = {"calculate_per_token_loss": True}
    checkpoint = str(tmp_path / "c")
    plain = (settings(model, **mean), [batch] * 2, None, (1, checkpoint))
    in_trainer(jobs.train, *plain)
    steps = steps_of(in_trainer(jobs.train, settings(model, **mean, **kept), [batch] * 4))
    now = [step["rollout/log_probs"] for step in steps]
    assert [step["ppo_kl"] for step in steps] == pytest.approx(
        [0, now[0] - now[1], 0, now[2] - now[3]], abs=2e-6
    )
    assert abs(now[0] - now[1]) > 1e-4 and abs(now[2] - now[3]) > 1e-4
    # Asked for in mid run, it begins as the policy of that time.
    later = in_trainer(jobs.train, settings(model, **mean, **kept), [batch], checkpoint)
    assert steps_of(later)[0]["ppo_kl"] == pytest.approx(0, abs=2e-6)


def test_other_policies_take_the_actors_place_without_a_copy(
    model: str, in_trainer: Callable[..., Any]
) -> None:
    found = in_trainer(jobs.held_places, settings(model))
    assert found["during"] == found["held"], "on a CPU the parameters point to the held weights"
    assert found["after"] == found["before"] != found["held"]


@pytest.mark.parametrize(
    ("target", "horizon", "factor"), [(1e-9, 240, 1 + 0.2 * 24 / 240), (1e9, 240, 1 - 0.2 / 10)]
)
def test_the_kl_coefficient_follows_its_target_from_the_next_iteration_on(
    model: str,
    reference: str,
    batch: TrainBatch,
    in_trainer: Callable[..., Any],
    tmp_path: Path,
    target: float,
    horizon: int,
    factor: float,
) -> None:
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2", "ref_load": reference}
    chosen = settings(model, kl_target=target, kl_horizon=horizon, **kl)
    checkpoint = str(tmp_path / "c")
    whole = steps_of(in_trainer(jobs.train, chosen, [batch] * 3, None, (1, checkpoint)))
    found = [step["kl_coef"] for step in whole]
    assert found == pytest.approx([0.1, 0.1 * factor, 0.1 * factor**2])
    for step in whole:
        assert step["loss"] - step["pg_loss"] == pytest.approx(
            step["kl_coef"] * step["kl_loss"] * share_trained(batch), rel=1e-3
        )
    assert steps_of(in_trainer(jobs.train, chosen, [batch], checkpoint)) == whole[2:]
    fixed = steps_of(in_trainer(jobs.train, settings(model, **kl), [batch] * 2))
    assert [step["kl_coef"] for step in fixed] == [0.1, 0.1]


def share_trained(batch: TrainBatch) -> float:
    """A rollout without a trained token counts in the loss and not in metrics."""
    return models.trained_rollouts(batch) / len(set(batch.rollout_ids.tolist()))


ROLES = {
    "ppo": PPO
    | {
        "kl_coef": 0.1,
        "kl_target": 0.01,
        "kl_horizon": 100,
        "ref_update_interval": 2,
        "lambd": 0.9,
    },
    "kl-loss": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl",
        "ref_update_interval": 2,
    },
    "old-actor": {"keep_old_actor": True, "old_actor_update_interval": 2},
    "plus": PLUS | {"kl_coef": 0.1, "gamma": 0.99},
}


@pytest.mark.parametrize("name", sorted(ROLES))
def test_a_resume_continues_bit_for_bit_with_all_roles(
    name: str,
    model: str,
    reference: str,
    tmp_path: Path,
    two_steps: TrainBatch,
    in_trainer: Callable[..., Any],
) -> None:
    chosen = settings(model, ref_load=reference, **ROLES[name])
    checkpoint = str(tmp_path / "c")
    whole = in_trainer(jobs.train, chosen, [two_steps] * 5, None, (2, checkpoint))
    resumed = in_trainer(jobs.train, chosen, [two_steps] * 2, checkpoint)
    assert resumed["loaded"]["weights_digest"] == steps_of(whole)[5]["weights_digest"]
    assert steps_of(resumed) == steps_of(whole)[6:]


def test_a_role_that_a_checkpoint_lacks_begins_anew(
    model: str, tmp_path: Path, batch: TrainBatch, in_trainer: Callable[..., Any]
) -> None:
    """The estimator may change in mid run."""
    checkpoint = str(tmp_path / "c")
    in_trainer(jobs.train, settings(model), [batch] * 2, None, (1, checkpoint))
    found = in_trainer(jobs.train, settings(model, **PPO), [batch] * 2, checkpoint)
    first, second = steps_of(found)
    assert first["rollout/values"] == 0.0 != second["rollout/values"]
    fresh = steps_of(in_trainer(jobs.train, settings(model, **PPO), [batch]))[0]
    assert first["weights_digest"].split()[0] != fresh["weights_digest"].split()[0]


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {
        "pipeline_model_parallel_size": 2,
        "megatron": {"num_layers_in_first_pipeline_stage": 1},
    },
}


@pytest.mark.parametrize(
    ("layout", "name"),
    [("dp2", "ppo"), ("dp2", "kl-loss"), ("dp2", "plus"), ("tp2-sp", "plus"), ("pp2", "kl-loss")],
)
def test_two_ranks_train_like_one(
    layout: str,
    name: str,
    model: str,
    reference: str,
    two_steps: TrainBatch,
    in_trainer: Callable[..., Any],
    in_ranks: Callable[..., list[Any]],
) -> None:
    base = settings(model, ref_load=reference, **ROLES[name]) | {"adam_eps": 1e-2}
    alone = steps_of(in_trainer(jobs.train, base, [two_steps] * 3))
    pair = in_ranks(jobs.train_on_rank, base | LAYOUTS[layout], [two_steps] * 3)
    assert steps_of(pair[0]) == steps_of(pair[1])
    compared = ("loss", "grad_norm", "rollout/advantages", "kl_loss", "value_loss")
    for ours, theirs in zip(steps_of(pair[0]), alone, strict=True):
        for number in compared:
            if number in theirs:
                assert ours[number] == pytest.approx(theirs[number], rel=2e-5, abs=5e-6), number
