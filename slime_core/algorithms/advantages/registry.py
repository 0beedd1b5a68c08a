"""Advantage estimators by name. Free of torch: pack applies the reward part and seals it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slime_core.algorithms.advantages import group_baselines as baselines
from slime_core.algorithms.advantages.groups import Groups
from slime_core.algorithms.advantages.grpo import dr_grpo, grpo
from slime_core.errors import ConfigError


@dataclass(frozen=True)
class Estimator:
    """How rewards become advantages, and which loss goes with them.

    Attributes:
        name: value of `--advantage-estimator`.
        rewards: Groups -> float64 [n], applied by pack; the result is TrainBatch.rewards.
        token_advantages: what the trainer makes of it. broadcast: the same for each token.
            discounted: KL-shaped returns (REINFORCE++). kl_shaped: minus kl_coef * KL a token.
            gae: critic values.
        loss: default policy loss.
        needs_group: a group of one sample teaches nothing.
        needs_whitening: `--normalize-advantages` is required.
        reduction: loss reduction the paper asks for, None for the configured one.
    """

    name: str
    rewards: Callable[[Groups], np.ndarray]
    token_advantages: Literal["broadcast", "discounted", "kl_shaped", "gae"] = "broadcast"
    loss: str = "ppo"
    needs_group: bool = True
    needs_whitening: bool = False
    reduction: str | None = None


_ESTIMATORS = (
    Estimator("grpo", grpo),
    Estimator("dr_grpo", dr_grpo, reduction="constant_length"),
    Estimator("gspo", grpo, loss="gspo"),
    Estimator("cispo", grpo, loss="cispo"),
    Estimator("sapo", grpo, loss="sapo"),
    Estimator("gmpo", grpo, loss="gmpo"),
    Estimator("ipo", grpo, loss="ipo_tv"),
    Estimator("rloo", baselines.rloo),
    Estimator("opo", baselines.opo),
    Estimator("gpg", baselines.gpg, loss="policy_gradient"),
    Estimator("remax", baselines.remax, needs_group=False),
    Estimator("max_rl", baselines.max_rl),
    Estimator("pass_at_k", baselines.pass_at_k),
    Estimator(
        "reinforce_plus_plus",
        baselines.raw,
        token_advantages="discounted",
        needs_group=False,
        needs_whitening=True,
    ),
    Estimator(
        "reinforce_plus_plus_baseline",
        baselines.group_centred,
        token_advantages="kl_shaped",
        needs_whitening=True,
    ),
    Estimator("ppo", baselines.raw, token_advantages="gae", needs_group=False),
)
ESTIMATORS: dict[str, Estimator] = {estimator.name: estimator for estimator in _ESTIMATORS}


def get_estimator(name: str) -> Estimator:
    """Finds an estimator.

    Raises:
        ConfigError: unknown name; the nearest known one is suggested.
    """
    if name not in ESTIMATORS:
        raise ConfigError(unknown_name("--advantage-estimator", name, list(ESTIMATORS)))
    return ESTIMATORS[name]


def group_rewards(
    name: str,
    groups: Groups,
    *,
    rewards_normalization: bool = True,
    std_normalization: bool = True,
) -> np.ndarray:
    """What pack seals as TrainBatch.rewards. float64 [n]

    Args:
        name: the estimator.
        groups: raw rewards with their groups.
        rewards_normalization: False passes rewards through
            (`--disable-rewards-normalization`).
        std_normalization: False leaves out the group std of GRPO and pass@k
            (`--disable-grpo-std-normalization`).
    """
    estimator = get_estimator(name)
    if not rewards_normalization:
        return groups.rewards
    if estimator.rewards is grpo:
        return grpo(groups, std_normalization)
    if estimator.rewards is baselines.pass_at_k:
        return baselines.pass_at_k(groups, std_normalization)
    return estimator.rewards(groups)


def unknown_name(flag: str, name: str, known: list[str]) -> str:
    """A sentence about a name that does not exist, with the nearest that does."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{flag} {name!r} is unknown{hint} Known: {', '.join(known)}"
