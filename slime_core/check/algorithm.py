"""What an algorithm's settings will do to the samples they get."""

from __future__ import annotations

from slime_core.algorithms.advantages.registry import get_estimator
from slime_core.check.findings import Findings
from slime_core.config.tree import RunConfig


def check_groups(config: RunConfig, findings: Findings) -> None:
    """Notes where samples have nobody to be compared with."""
    algorithm = config.algorithm
    estimator = get_estimator(algorithm.advantage_estimator)
    alone = config.rollout.n_samples_per_prompt == 1 and estimator.needs_group
    if alone and algorithm.loss_type == "policy_loss" and _by_group(config):
        findings.notes.append(
            f"n_samples_per_prompt 1: {estimator.name} compares samples of one prompt, and a "
            "sample without others gets advantage 0, so nothing is learned; use more samples, or "
            "reinforce_plus_plus or ppo"
        )


def _by_group(config: RunConfig) -> bool:
    """Advantages come from the group alone."""
    algorithm = config.algorithm
    others = (
        algorithm.disable_rewards_normalization,
        algorithm.custom_advantage_function_path,
        algorithm.use_opd,
        config.rewards.custom_reward_post_process_path,
        config.rewards.custom_convert_samples_to_train_data_path,
    )
    return not any(others)
