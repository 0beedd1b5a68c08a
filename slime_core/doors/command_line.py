"""Reads a command line as slime writes it, every flag of the tree, Megatron and SGLang included."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from slime_core.config.aliases import name_conflicts
from slime_core.config.flags import option_strings, overrides_of, unknown
from slime_core.config.loading import value_problems
from slime_core.doors.options import more_flags, option_of
from slime_core.errors import ConfigError


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses strictly. Megatron's and SGLang's options end up in `megatron` and `sglang`, other
    names of fields under themselves, for `overrides_of`.

    Raises:
        ConfigError: every flag that is unknown, not there yet or refused, one line each; or a
            value that is missing or of another type, or one thing under two names.
    """
    others, own = _apart(arguments, set(option_strings(parser)))
    problems: list[str] = []
    parsed, rest = parser.parse_known_args(_sound(parser, own, problems))
    problems += [unknown(token, parser, more_flags()) for token in rest]
    groups: dict[str, dict[str, Any]] = {"megatron": {}, "sglang": {}}
    for flag, texts in others:
        try:
            option = option_of(flag)
            if option is None:
                problems.append(unknown(flag, parser, more_flags()))
            elif option.place == "already":
                option.read(texts)
            elif option.place:
                groups[option.place][option.name] = option.read(texts)
            else:
                setattr(parsed, option.name, option.read(texts))
        except ConfigError as error:
            problems.append(str(error))
    given = overrides_of(parsed)
    problems += name_conflicts(given)
    if problems:
        problems += value_problems(given)
        raise ConfigError("\n".join(problems))
    for place, values in groups.items():
        if values:
            setattr(parsed, place, {**getattr(parsed, place, {}), **values})
    _engine_size(parsed)
    return parsed


def _sound(parser: argparse.ArgumentParser, own: list[str], problems: list[str]) -> list[str]:
    """The arguments without the flags whose values argparse refuses: it would stop at the first."""
    try:
        parser.parse_known_args(own)
        return own
    except ConfigError as error:
        first = str(error)
    kept: list[str] = []
    for group in groups_of(own):
        try:
            if group[0].startswith("--"):
                parser.parse_known_args([*kept[:1], *group] if _is_path(kept) else group)
            kept += group
        except ConfigError as error:
            problems.append(str(error))
    if not problems:
        raise ConfigError(first)
    return kept


def _is_path(kept: list[str]) -> bool:
    return bool(kept) and not kept[0].startswith("-")


def groups_of(arguments: Sequence[str]) -> list[list[str]]:
    """Each flag with the words that follow it."""
    groups: list[list[str]] = []
    for word in arguments:
        if not groups or (word.startswith("--") and len(word) > 2):
            groups.append([])
        groups[-1].append(word)
    return groups


def _apart(
    arguments: Sequence[str], known: set[str]
) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """The flags that the parser does not have with their values, and the rest for the parser.

    argparse would take the value of a flag that it does not know for the configuration's path.
    """
    others: list[tuple[str, list[str]]] = []
    own: list[str] = []
    current = own
    for token in arguments:
        flag, equals, text = token.partition("=")
        if not token.startswith("--") or len(token) == 2:
            current.append(token)
        elif flag in known:
            own.append(token)
            current = own
        else:
            others.append((flag, [text] if equals else []))
            current = others[-1][1]
    return others, own


def _engine_size(parsed: argparse.Namespace) -> None:
    """`--sglang-tp-size` alone sets the GPUs of an engine, as pp x tp."""
    sglang = getattr(parsed, "sglang", {})
    tensor = sglang.get("tp_size", sglang.get("tensor_parallel_size"))
    if isinstance(tensor, int) and not hasattr(parsed, "rollout_num_gpus_per_engine"):
        pipeline = sglang.get("pp_size", sglang.get("pipeline_parallel_size", 1))
        parsed.rollout_num_gpus_per_engine = tensor * pipeline
