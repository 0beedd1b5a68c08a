"""Small helpers of slime that plug-ins import besides what rollouts need."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def parse_args(add_custom_arguments: Callable[[Any], Any] | None = None) -> Any:
    """The settings of this process's command line, as plug-ins see them.

    Args:
        add_custom_arguments: adds arguments of one's own to a parser; they are in the result, too.

    Raises:
        ConfigError: the command line does not fit.
    """
    import argparse

    from slime_core.config.flags import FlagParser, add_flags, overrides_of
    from slime_core.config.loading import load_config
    from slime_core.doors.command_line import parse
    from slime_core.plugins.args_view import ArgsView

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if add_custom_arguments is not None:
        own = add_custom_arguments(own) or own
    more, rest = own.parse_known_args(sys.argv[1:])
    parser = FlagParser(prog="slime")
    parser.add_argument("config", nargs="?")
    add_flags(parser)
    parsed = parse(parser, rest)
    args = ArgsView(load_config(parsed.config or {}, overrides_of(parsed)))
    args.__dict__.update(vars(more))
    return args


def dict_add_prefix(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The same values under longer names."""
    return {f"{prefix}{name}": value for name, value in values.items()}


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """mean, median, max and min; empty without values."""
    numbers = [float(value) for value in values]
    if not numbers:
        return {}
    return {
        "mean": statistics.fmean(numbers),
        "median": statistics.median(numbers),
        "max": max(numbers),
        "min": min(numbers),
    }


def group_by(items: Iterable[Any], key: Callable[[Any], Any] | None = None) -> dict[Any, list[Any]]:
    """Items by their key, in their order."""
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(item if key is None else key(item), []).append(item)
    return found


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """From the first trained token to the end, of each mask."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]


def encode_image_for_rollout_engine(image: Any) -> str:
    """A picture as the data URI that engines take."""
    from slime_core.engines.media import media_text

    return media_text(image)


def load_tokenizer(name_or_path: str, **options: Any) -> Any:
    """A tokenizer from local files.

    Raises:
        ConfigError: there is none.
    """
    from slime_core.data.tokenizer import load_tokenizer as load

    return load(name_or_path)


def load_processor(name_or_path: str, **options: Any) -> None:
    """None, as for a model of text: media go to the engines as they are."""


def call_dynamic_filter(function: Any, *given: Any, **named: Any) -> Any:
    """A filter's verdict as a DynamicFilterOutput; without a filter everything is kept."""
    from slime_core.rollout.filters import DynamicFilterOutput
    from slime_core.rollout.group_notes import note_drop

    if function is None:
        return DynamicFilterOutput(keep=True)
    found = function(*given, **named)
    verdict = found if hasattr(found, "keep") else DynamicFilterOutput(keep=bool(found))
    if not verdict.keep and len(given) > 1 and isinstance(given[1], (list, tuple)):
        note_drop(given[1], verdict.reason)
    return verdict
