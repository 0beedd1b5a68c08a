"""Every configuration that the project ships passes its own rules."""

from pathlib import Path

import pytest

from slime_core.config.loading import load_config

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_it_loads_and_its_files_are_there(path):
    config = load_config(path, {})
    assert Path(config.data.prompt_data).is_file()
    assert (Path(config.rollout.hf_checkpoint) / "config.json").is_file()


def test_the_critic_of_ppo_is_trained_faster_than_its_policy():
    path = next(path for path in CONFIGS if path.stem == "ppo-critic")
    config = load_config(path, {})
    assert config.algorithm.advantage_estimator == "ppo"
    assert config.algorithm.critic_lr and config.algorithm.critic_lr > config.train.lr
