"""The group `algorithm`: nothing contradicts, nothing is set without effect, all of it arrives."""

import dataclasses
from typing import get_args

import pytest

from slime_core.algorithms.advantages.registry import ESTIMATORS
from slime_core.algorithms.kl import KL_TYPES
from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.cluster.trainer_settings import algorithm_settings
from slime_core.config.algorithm import AlgorithmGroup, EstimatorName
from slime_core.errors import ConfigError
from tests.unit.config.trees import small

FOR_PACK = {"disable_grpo_std_normalization", "disable_rewards_normalization"}
PLUS = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}
PPO = {"advantage_estimator": "ppo"}
OLD_ACTOR = {"keep_old_actor": True, "old_actor_update_interval": 2}
TIS_HOOK = {"use_tis": True, "custom_tis_function_path": "f.py"}
CUSTOM = {"loss_type": "custom_loss", "custom_loss_function_path": "f.py"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"advantage_estimator": "remax", "reward_shaping": "cosine"},
            ("the greedy answer, which reward_shaping cosine does not shape",),
        ),
        (
            {"advantage_estimator": "reinforce_plus_plus"},
            ("reinforce_plus_plus divides", "set normalize_advantages"),
        ),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, ("set normalize_advantages",)),
        (
            {"advantage_estimator": "dr_grpo", "calculate_per_token_loss": True},
            ("dr_grpo divides by a constant length", "calculate_per_token_loss"),
        ),
        (
            PPO | {"kl_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2},
            ("kl_coef 0.1", "kl_loss_coef 0.2", "twice: choose one"),
        ),
        ({"kl_coef": 0.1}, ("kl_coef 0.1 shapes token rewards, which grpo", "use use_kl_loss")),
        ({"use_tis": True, "use_rollout_logprobs": True}, ("correct for the engine", "choose one")),
        (
            {"use_rollout_logprobs": True, "old_log_probs": "recompute"},
            ("old_log_probs recompute would change nothing",),
        ),
        ({"use_opsm": True}, ("use_opsm", "num_steps_per_rollout above 1")),
        ({"use_tis": True, "tis_clip_low": 3.0}, ("tis_clip_low 3.0 is above tis_clip 2.0",)),
        (
            {"use_tis": True, "tis_mode": "truncate", "tis_clip_low": 0.5},
            ("truncate has no lower bound",),
        ),
        (
            {"use_routing_replay": True, "loss_type": "sft_loss"},
            ("sft_loss, which has no earlier pass: leave it out",),
        ),
        (
            {"use_rollout_routing_replay": True, "loss_type": "sft_loss"},
            ("sft_loss, which uses no engine: leave it out",),
        ),
        ({"kl_loss_coef": 0.1}, ("kl_loss_coef 0.1 has an effect only with use_kl_loss",)),
        ({"use_unbiased_kl": True}, ("only with use_kl_loss",)),
        ({"kl_loss_type": "k3"}, ("kl_loss_type k3", "with use_kl_loss or kl_coef")),
        ({"ref_update_interval": 2}, ("with use_kl_loss or kl_coef",)),
        ({"tis_clip": 3.0}, ("tis_clip 3.0 has an effect only with use_tis",)),
        ({"tis_level": "sequence"}, ("only with use_tis",)),
        ({"rs_level": "sequence"}, ("only with use_rs",)),
        (
            {"use_rs": True, "rs_lower_bound": 3.0},
            ("rs_lower_bound 3.0 is above rs_upper_bound 2.0",),
        ),
        ({"use_kl_loss": True, "kl_target": 0.1}, ("with kl_coef or kl_loss_coef",)),
        ({"kl_horizon": 5}, ("only with kl_target",)),
        ({"opsm_delta": 0.5}, ("only with use_opsm",)),
        ({"use_opd": True}, ("use_opd needs a teacher: set opd_teacher_load",)),
        ({"opd_teacher_load": "t"}, ("only with use_opd",)),
        ({"gamma": 0.9}, ("gamma 0.9", "reinforce_plus_plus or ppo")),
        (PLUS | {"lambd": 0.9}, ("lambd 0.9", "with advantage_estimator ppo")),
        ({"critic_lr": 1e-3}, ("critic_lr 0.001", "with advantage_estimator ppo")),
        ({"sapo_tau_pos": 2.0}, ("with advantage_estimator sapo",)),
        (
            {"advantage_estimator": "cispo", "eps_clip_c": 3.0},
            ("eps_clip_c 3.0", "not with cispo"),
        ),
        (
            {"advantage_estimator": "rloo", "disable_grpo_std_normalization": True},
            ("disable_grpo_std_normalization", "divides by the group's std"),
        ),
        (PPO | {"disable_rewards_normalization": True}, ("which ppo, reinforce_plus_plus",)),
        (PPO | {"num_critic_only_steps": 3}, ("untrained in all 2 iterations",)),
        ({"eps_clip": 1.0}, ("eps_clip 1.0 would allow negative ratios",)),
        ({"use_rs": True, "rs_level": "max"}, ("set rs_estimator k2 or k3",)),
        (
            {"use_rs": True, "rs_estimator": "k3", "rs_lower_bound": 0.1},
            ("rs_lower_bound 0.1", "only with rs_estimator k1"),
        ),
        ({"tis_batch_normalize": True}, ("only with use_tis",)),
        ({"ipo_threshold": 0.3}, ("with advantage_estimator ipo",)),
        (
            {"advantage_estimator": "gpg", "eps_clip": 0.1},
            ("eps_clip 0.1", "not with sapo, ipo and gpg"),
        ),
        (
            {"true_on_policy_mode": True, "num_steps_per_rollout": 2},
            ("2 optimizer steps an iteration", "use one"),
        ),
        ({"true_on_policy_mode": True, "use_tis": True}, ("leaves use_tis nothing to correct",)),
        (
            {
                **{"true_on_policy_mode": True, "partial_rollout": True},
                "over_sampling_batch_size": 8,
            },
            ("partial_rollout carries samples over",),
        ),
        ({"keep_old_actor": True}, ("set old_actor_update_interval to 2 or more",)),
        ({"old_actor_update_interval": 2}, ("only with keep_old_actor",)),
        (OLD_ACTOR | {"use_rollout_logprobs": True}, ("what the ratio refers to: choose one",)),
        (OLD_ACTOR | {"true_on_policy_mode": True}, ("leaves keep_old_actor nothing",)),
        ({"loss_type": "custom_loss"}, ("set custom_loss_function_path",)),
        ({"custom_loss_function_path": "f.py"}, ("only with loss_type custom_loss",)),
        ({"custom_tis_function_path": "f.py"}, ("only with use_tis",)),
        (TIS_HOOK | {"tis_clip": 3.0}, ("tis_clip 3.0", "without custom_tis_function_path")),
        (TIS_HOOK | {"use_rs": True}, ("use_rs True", "which decides alone")),
        (
            {"advantage_estimator": "dr_grpo", "custom_pg_loss_reducer_function_path": "f.py"},
            ("both decide how tokens are weighed",),
        ),
        (
            {"loss_type": "sft_loss", "use_routing_replay": True},
            ("use_routing_replay True", "which has no earlier pass"),
        ),
        ({"loss_type": "sft_loss", "use_tis": True}, ("only with loss_type policy_loss",)),
        (
            {"loss_type": "sft_loss", "normalize_advantages": True},
            ("where the loss looks at advantages",),
        ),
        (PPO | {"loss_type": "sft_loss"}, ("sft_loss has no critic",)),
        (CUSTOM | {"entropy_coef": 0.1}, ("which is the whole loss",)),
        (
            {"disable_compute_advantages_and_returns": True},
            ("only with loss_type sft_loss or custom_loss",),
        ),
    ],
)
def test_what_contradicts_or_has_no_effect_is_one_sentence(overrides, words):
    with pytest.raises(ConfigError) as error:
        small(**overrides)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "overrides",
    [
        *({"advantage_estimator": name} for name in ("rloo", "opo", "gpg", "remax")),
        PLUS | {"kl_coef": 0.01, "gamma": 0.99, "kl_loss_type": "k2"},
        PPO | {"kl_coef": 0.01, "lambd": 0.95, "critic_lr": 1e-3, "num_critic_only_steps": 1},
        PPO | {"use_kl_loss": True, "kl_loss_coef": 0.01, "eps_clip_c": 3.0},
        {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
        {"use_kl_loss": True},
        {"use_opd": True, "opd_teacher_load": "t", "opd_kl_coef": 0.5},
        {"ref_load": "elsewhere"},  # launch scripts name the reference also where no KL is used
        {"use_rs": True, "rs_level": "max", "rs_estimator": "k3"},
        {"use_tis": True, "tis_batch_normalize": True, "use_rs": True},
        {"advantage_estimator": "ipo", "ipo_threshold": 0.2, "ipo_kl_tau": 0.0},
        {"true_on_policy_mode": True, "get_mismatch_metrics": True},
        OLD_ACTOR | {"use_opsm": True, "use_tis": True},
        CUSTOM | {"normalize_advantages": True},
        TIS_HOOK | {"get_mismatch_metrics": True},
        {"loss_type": "sft_loss", "disable_compute_advantages_and_returns": True},
        {"use_opsm": True, "num_steps_per_rollout": 2},
        {"use_opsm": True, "use_rollout_logprobs": True},
        {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.5, "get_mismatch_metrics": True},
    ],
)
def test_what_fits_together_passes(overrides):
    small(**overrides)


def test_the_choices_are_those_of_the_algorithms():
    assert set(get_args(EstimatorName)) == set(ESTIMATORS)
    assert get_args(AlgorithmGroup.model_fields["kl_loss_type"].annotation) == KL_TYPES


def test_every_field_reaches_pack_or_the_trainer_with_the_same_default():
    ours = {field.name: field.default for field in dataclasses.fields(AlgorithmSettings)}
    groups = {name: info.default for name, info in AlgorithmGroup.model_fields.items()}
    assert set(groups) - FOR_PACK == set(ours) - {"max_response_len"}
    assert {name: value for name, value in groups.items() if name in ours} == {
        name: value for name, value in ours.items() if name != "max_response_len"
    }


def test_the_trainer_gets_the_configured_values():
    config = small(advantage_estimator="dr_grpo", use_kl_loss=True, kl_loss_coef=0.5, eps_clip=0.1)
    found = algorithm_settings(config)
    assert (found.advantage_estimator, found.kl_loss_coef, found.eps_clip) == ("dr_grpo", 0.5, 0.1)
    assert found.max_response_len == config.rollout.rollout_max_response_len == 8
