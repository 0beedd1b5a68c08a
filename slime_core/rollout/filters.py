"""Which finished groups are trained: dynamic sampling filters on raw rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.load import check_signature, load
from slime_core.plugins.user_code import no_exit, raised
from slime_core.sample import Sample

STD_TOLERANCE = 1e-6


@dataclass(frozen=True)
class DynamicFilterOutput:
    """A filter's verdict on one group.

    Attributes:
        keep: train it.
        reason: why it is dropped; counted as dynamic_filter/drop_<reason>.
        keep_when_insufficient: keep it after all where the target could not be reached without.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether the unbiased standard deviation of rewards, in float64, exceeds 1e-6.

    A single reward has no spread.
    """
    if len(rewards) < 2:
        return False
    return bool(np.std(np.asarray(rewards, dtype=np.float64), ddof=1) > STD_TOLERANCE)


def check_reward_nonzero_std(
    args: Any, samples: Sequence[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """Drops a group whose rewards are all alike: it teaches nothing."""
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    if has_spread(rewards):
        return DynamicFilterOutput(keep=True)
    shown = f"{rewards[0]:.1f}" if rewards else "empty"
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{shown}")


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: Sequence[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """The same, but such groups fill up a batch that cannot be filled otherwise."""
    verdict = check_reward_nonzero_std(args, samples)
    return DynamicFilterOutput(verdict.keep, verdict.reason, keep_when_insufficient=True)


BUILT_IN = {
    "check_reward_nonzero_std": check_reward_nonzero_std,
    "check_reward_nonzero_std_with_fallback": check_reward_nonzero_std_with_fallback,
}


def load_filter(path: str | None) -> Any:
    """The function of a path, None without one.

    Raises:
        PluginError: it cannot be loaded, or called as `filter(args, samples)`.
    """
    if not path:
        return None
    if _ours(path):
        name = path.rpartition(".")[2].rpartition(":")[2]
        if name in BUILT_IN:
            return BUILT_IN[name]
    function = load(path)
    check_signature(function, path, ("args", "samples"), must_be_plain=True)
    return function


def judge(path: str | None, args: Any, samples: Sequence[Sample]) -> DynamicFilterOutput:
    """The verdict of the filter at an import path (a built-in's bare name will do).

    A plain True or False counts as a verdict; None as path keeps everything.

    Raises:
        PluginError: the filter raised, or returned something else.
    """
    if not path:
        return DynamicFilterOutput(keep=True)
    try:
        with no_exit(path):
            verdict = load_filter(path)(args, samples)
    except SlimeError:
        raise
    except Exception as error:
        raise PluginError(f"{path} raised {raised(error)}") from error
    if isinstance(verdict, (bool, np.bool_)):
        return DynamicFilterOutput(keep=bool(verdict))
    if not hasattr(verdict, "keep"):
        raise PluginError(f"{path} returned {verdict!r}; a DynamicFilterOutput or bool is needed")
    return DynamicFilterOutput(
        keep=bool(verdict.keep),
        reason=getattr(verdict, "reason", None),
        keep_when_insufficient=bool(getattr(verdict, "keep_when_insufficient", False)),
    )


def is_dropped(verdict: DynamicFilterOutput, remaining: int, target: int) -> bool:
    """Whether a group is dropped for good.

    Args:
        verdict: of its filter.
        remaining: groups that are kept or may still be: this one included.
        target: groups needed.
    """
    if verdict.keep:
        return False
    return not (verdict.keep_when_insufficient and remaining <= target)


def _ours(path: str) -> bool:
    """Bare names, and the place where slime keeps its filters."""
    return path in BUILT_IN or path.startswith("slime.rollout.filter_hub.")
