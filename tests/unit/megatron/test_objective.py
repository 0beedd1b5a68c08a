"""From names in the settings to the objective."""

from __future__ import annotations

import pytest

from slime_core.algorithms.advantages.registry import ESTIMATORS
from slime_core.algorithms.losses.policy_gradient import cispo, ipo_tv, policy_gradient, sft
from slime_core.algorithms.losses.ppo import ppo_clip
from slime_core.algorithms.losses.sapo import sapo
from slime_core.algorithms.losses.sequence import gmpo, gspo
from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.errors import ConfigError
from slime_core.megatron.objective import objective_of


def test_numbers_come_from_the_settings() -> None:
    objective = objective_of(
        AlgorithmSettings(
            eps_clip=0.1,
            eps_clip_high=0.3,
            eps_clip_c=3.0,
            entropy_coef=0.01,
            sapo_tau_pos=2.0,
            sapo_tau_neg=3.0,
            use_kl_loss=True,
            kl_loss_coef=0.5,
            kl_loss_type="k3",
            use_unbiased_kl=True,
            use_opsm=True,
            opsm_delta=0.25,
            get_mismatch_metrics=True,
        )
    )
    options = objective.options
    assert (options.eps_clip, options.high, options.eps_clip_c) == (0.1, 0.3, 3.0)
    assert (options.sapo_tau_pos, options.sapo_tau_neg) == (2.0, 3.0)
    assert (objective.entropy_coef, objective.opsm_delta) == (0.01, 0.25)
    assert (objective.kl_loss_coef, objective.kl_loss_type) == (0.5, "k3")
    assert objective.use_unbiased_kl and objective.mismatch_metrics


def test_what_is_not_asked_for_is_left_out() -> None:
    objective = objective_of(AlgorithmSettings(kl_loss_coef=0.5, opsm_delta=1.0))
    assert (objective.kl_loss_coef, objective.opsm_delta, objective.correction) == (None,) * 3
    assert objective_of(AlgorithmSettings(use_kl_loss=True)).kl_loss_coef == 0.0


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("grpo", ppo_clip),
        ("gspo", gspo),
        ("cispo", cispo),
        ("sapo", sapo),
        ("gmpo", gmpo),
        ("gpg", policy_gradient),
        ("ipo", ipo_tv),
        ("rloo", ppo_clip),
        ("ppo", ppo_clip),
    ],
)
def test_each_estimator_brings_its_loss(name: str, loss: object) -> None:
    assert objective_of(AlgorithmSettings(advantage_estimator=name)).policy_loss is loss


def test_the_supervised_loss_asks_no_estimator() -> None:
    assert objective_of(AlgorithmSettings(loss_type="sft_loss")).policy_loss is sft


def test_reductions() -> None:
    assert objective_of(AlgorithmSettings()).reduction == "sample_mean"
    per_token = AlgorithmSettings(calculate_per_token_loss=True)
    assert objective_of(per_token).reduction == "token_mean"
    dr = objective_of(AlgorithmSettings(advantage_estimator="dr_grpo", max_response_len=6))
    assert (dr.reduction, dr.constant_length) == ("constant_length", 6)


def test_an_estimator_without_what_it_needs_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs normalize_advantages"):
        AlgorithmSettings(advantage_estimator="reinforce_plus_plus")
    with pytest.raises(ConfigError, match="needs the longest response"):
        AlgorithmSettings(advantage_estimator="dr_grpo")


def test_an_unknown_estimator_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean grpo"):
        AlgorithmSettings(advantage_estimator="grp")


@pytest.mark.parametrize(
    ("steps", "changes", "needed"),
    [
        (1, {}, False),
        (2, {}, True),
        (1, {"old_log_probs": "recompute"}, True),
        (1, {"use_tis": True}, False),
        (1, {"use_tis": True, "tis_batch_normalize": True}, True),
        (1, {"custom_advantage_function_path": "f.py"}, True),
        (1, {"rollout_data_postprocess_path": "f.py"}, True),
        (1, {"use_routing_replay": True}, True),
        # Routes of the engine are there before any pass; slime's scripts set both flags.
        (1, {"use_routing_replay": True, "use_rollout_routing_replay": True}, False),
        (1, {"use_rollout_routing_replay": True}, False),
        (2, {"use_rollout_logprobs": True, "use_routing_replay": True}, True),
        (2, {"loss_type": "sft_loss"}, False),
        (2, {"use_tis": True}, True),
        (2, {"use_rollout_logprobs": True}, False),
        (1, {"use_rollout_logprobs": True, "get_mismatch_metrics": True}, False),
        (2, {"use_rollout_logprobs": True, "get_mismatch_metrics": True}, True),
        (1, {"advantage_estimator": "ppo", "kl_coef": 0.1}, True),
    ],
)
def test_the_pass_for_old_log_probs_runs_only_where_it_tells_something(
    steps: int, changes: dict[str, object], needed: bool
) -> None:
    assert AlgorithmSettings(**changes).needs_old_log_probs(steps) is needed  # type: ignore[arg-type]


def test_only_ppo_has_a_critic_and_only_a_kl_has_a_reference() -> None:
    for name in ESTIMATORS:
        settings = AlgorithmSettings(
            advantage_estimator=name, normalize_advantages=True, max_response_len=4
        )
        assert settings.uses_critic is (name == "ppo")
        assert not settings.uses_reference
    assert AlgorithmSettings(use_kl_loss=True).uses_reference
    assert AlgorithmSettings(advantage_estimator="ppo", kl_coef=0.1).uses_reference
