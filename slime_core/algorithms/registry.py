"""Policy losses by name. Estimators, which need no torch, are in advantages/registry.py."""

from __future__ import annotations

from collections.abc import Callable

from slime_core.algorithms.advantages.registry import unknown_name
from slime_core.algorithms.losses.policy_gradient import cispo, ipo_tv, policy_gradient, sft
from slime_core.algorithms.losses.ppo import ppo_clip
from slime_core.algorithms.losses.sapo import sapo
from slime_core.algorithms.losses.sequence import gmpo, gspo
from slime_core.algorithms.losses.types import PolicyInputs, PolicyOptions, TokenLoss
from slime_core.errors import ConfigError

PolicyLoss = Callable[[PolicyInputs, PolicyOptions], TokenLoss]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "ipo_tv": ipo_tv,
    "policy_gradient": policy_gradient,
    "sft": sft,
}


def get_policy_loss(name: str) -> PolicyLoss:
    """Finds a policy loss.

    Raises:
        ConfigError: unknown name; the nearest known one is suggested.
    """
    if name not in POLICY_LOSSES:
        raise ConfigError(unknown_name("policy loss", name, list(POLICY_LOSSES)))
    return POLICY_LOSSES[name]
