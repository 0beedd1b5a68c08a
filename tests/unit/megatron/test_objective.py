"""From names in the settings to the objective."""

from __future__ import annotations

import pytest

from slime_core.algorithms.losses.ppo import ppo_clip
from slime_core.algorithms.losses.sequence import gspo
from slime_core.errors import ConfigError
from slime_core.megatron.objective import objective_of
from slime_core.megatron.settings import TrainerSettings


def test_numbers_and_reduction_come_from_the_settings() -> None:
    settings = TrainerSettings(
        hf_checkpoint="x", eps_clip=0.1, eps_clip_high=0.3, eps_clip_c=3.0, entropy_coef=0.01
    )
    objective = objective_of(settings)
    assert objective.policy_loss is ppo_clip
    assert (objective.options.eps_clip, objective.options.high) == (0.1, 0.3)
    assert (objective.options.eps_clip_c, objective.entropy_coef) == (3.0, 0.01)
    assert objective.reduction == "sample_mean"
    per_token = TrainerSettings(
        hf_checkpoint="x", calculate_per_token_loss=True, advantage_estimator="gspo"
    )
    assert objective_of(per_token).reduction == "token_mean"
    assert objective_of(per_token).policy_loss is gspo


@pytest.mark.parametrize("name", ["ppo", "reinforce_plus_plus", "dr_grpo"])
def test_what_the_trainer_cannot_do_yet_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not supported by the trainer yet"):
        objective_of(TrainerSettings(hf_checkpoint="x", advantage_estimator=name))


def test_an_unknown_estimator_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean grpo"):
        objective_of(TrainerSettings(hf_checkpoint="x", advantage_estimator="grp"))
