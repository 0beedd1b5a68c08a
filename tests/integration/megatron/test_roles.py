"""Critic, reference, old actor and the moving KL coefficient: right numbers, also on a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import memory_jobs
import models
import numpy as np
import pytest
import torch
from algorithm_runs import PLUS, PPO, sample_weights, settings, steps_of

from slime_core.batching.types import TrainBatch


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
    found = in_trainer(memory_jobs.held_places, settings(model))
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("plus", "ppo") else pytest.mark.slow)
        for name in sorted(ROLES)
    ],
)
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
    compared += ("rollout/entropy", "rollout/correct_entropy")
    for ours, theirs in zip(steps_of(pair[0]), alone, strict=True):
        for number in compared:
            if number in theirs:
                assert ours[number] == pytest.approx(theirs[number], rel=2e-5, abs=5e-6), number
