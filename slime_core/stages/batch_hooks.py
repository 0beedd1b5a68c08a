"""Plug-ins that see a whole batch before it is sealed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_core.batching.converted import Converted, converted
from slime_core.errors import DataError, PluginError, SlimeError
from slime_core.plugins.load import check_signature, load
from slime_core.plugins.user_code import no_exit, raised
from slime_core.sample import Sample


def load_batch_hook(path: str | None, argument: str) -> Any:
    """The function of a path, None without one.

    Raises:
        PluginError: it cannot be loaded, or called as `fn(args, <argument>)`.
    """
    if not path:
        return None
    function = load(path)
    check_signature(function, path, ("args", argument), must_be_plain=True)
    return function


def removed_rows(path: str, args: Any, groups: Sequence[list[Sample]]) -> tuple[int, ...]:
    """Rows of the batch that a filter took out of the loss."""
    samples = [sample for group in groups for sample in group]
    before = [sample.remove_sample for sample in samples]
    _call(path, args, "groups", [list(group) for group in groups])
    after = [bool(sample.remove_sample) for sample in samples]
    both = enumerate(zip(before, after, strict=True))
    return tuple(row for row, (old, new) in both if new and not old)


def processed_rewards(path: str, args: Any, samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """(raw rewards [rows], rewards that advantages start from [rows]), both float64.

    Raises:
        PluginError: the function did not return two finite numbers for each sample.
    """
    found = _call(path, args, "samples", samples)
    try:
        raw, rewards = (np.asarray(column, dtype=np.float64) for column in found)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{path} must return (raw_rewards, rewards): {error}") from error
    for column in (raw, rewards):
        if column.shape != (len(samples),) or not np.isfinite(column).all():
            raise PluginError(
                f"{path} must return two lists of {len(samples)} finite numbers, one for each "
                f"sample; one has the shape {column.shape}"
            )
    return raw, rewards


def converted_rows(
    path: str,
    args: Any,
    copies: list[Sample],
    stored: Sequence[Sample],
    raw: np.ndarray,
    rollouts: np.ndarray,
) -> Converted:
    """What a function makes of the batch in place of the built-in conversion.

    Args:
        copies: [rows] what it gets and may change.
        stored: [rows] the same samples, which it cannot reach.
        raw: [rows] rewards as graded.
        rollouts: [rows] rows of one rollout share a number.

    Raises:
        PluginError: it raised, or what it returned cannot be trained.
    """
    found = _call(path, args, "samples", copies)
    try:
        return converted(path, found, stored, raw, rollouts)
    except DataError as error:
        raise PluginError(str(error)) from error


def _call(path: str, args: Any, argument: str, value: Any) -> Any:
    function = load_batch_hook(path, argument)
    try:
        with no_exit(path):
            return function(args, value)
    except SlimeError:
        raise
    except Exception as error:
        raise PluginError(f"{path} raised {raised(error)}") from error
