"""Command-line flags made from the configuration tree: `num_rollout` is --num-rollout."""

from __future__ import annotations

import argparse
import json
import re
import types
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from slime_core.config.aliases import aliases
from slime_core.config.fields import (
    OPEN_GROUPS,
    class_of,
    field_groups,
    field_info,
    group_types,
)
from slime_core.errors import ConfigError
from slime_core.near import nearest

SGLANG_PREFIX = "--sglang-"
MEGATRON_PLACE, SGLANG_PLACE = "--OPTION-OF-MEGATRON", f"{SGLANG_PREFIX}OPTION"
"""Stand in the help for flags that the parser does not list; none of them is a flag."""


LONG_DASHES = ("\u2010", "\u2013", "\u2014", "\u2212")
"""What documents and chats make of a flag's two hyphens."""
NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|-(inf|nan)", re.ASCII)
"""What follows a flag as its value, and is no flag itself: -1, -.5, -1e-3."""
SENTENCES = (
    (r"argument (\S+): expected (?:at least )?one argument", r"\1 needs a value"),
    (r"argument (\S+)/--no-\S+: ignored explicit argument .*",
     r"\1 is a switch, so it takes no value; --no-... switches it off"),
    (r"argument (--\S+): (is|must) ", r"\1 \2 "),
)  # fmt: skip
"""argparse's words -> ours."""


class FlagParser(argparse.ArgumentParser):
    """A parser whose errors are ConfigErrors and that never guesses at shortened flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._negative_number_matcher = NEGATIVE

    def error(self, message: str) -> NoReturn:
        raise ConfigError(_plain(message))


def _plain(message: str) -> str:
    for theirs, ours in SENTENCES:
        message = re.sub(theirs, ours, message)
    return message


def flag_of(field: str) -> str:
    """`rollout_batch_size` -> `--rollout-batch-size`."""
    return "--" + field.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag for each field of the tree, grouped as the tree is."""
    for group, model in group_types().items():
        section = parser.add_argument_group(group, (model.__doc__ or "").strip())
        for name in model.model_fields:
            _add_flag(section, name)
    section = parser.add_argument_group("engines and trainer", "options under their own names")
    for name in OPEN_GROUPS:
        text = f"{name} options as a JSON object"
        section.add_argument(
            flag_of(name), type=_json_dict, default=argparse.SUPPRESS, metavar="JSON", help=text
        )
    section.add_argument(
        MEGATRON_PLACE,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        metavar="VALUE",
        help="one option of Megatron under its classic name, such as --weight-decay 0.1",
    )
    section.add_argument(
        SGLANG_PLACE,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        metavar="VALUE",
        help="one option of the SGLang server, such as --sglang-mem-fraction-static 0.8",
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses strictly what the parser knows; doors.command_line.parse also knows slime's flags.

    Raises:
        ConfigError: an unknown flag (with the nearest known one), or a value that is missing.
    """
    parsed, rest = parser.parse_known_args(list(arguments))
    if rest:
        raise ConfigError(unknown(rest[0], parser))
    return parsed


def overrides_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given as flags, for `load_config`."""
    known = (*field_groups(), *OPEN_GROUPS, *aliases())
    return {name: value for name, value in vars(parsed).items() if name in known}


def _add_flag(section: Any, name: str) -> None:
    info = field_info(name)
    kinds = _kinds(info.annotation)
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(name, info)}
    if bool in kinds:
        section.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, **common)
    elif list in kinds:
        section.add_argument(flag_of(name), nargs="+", action="extend", metavar="VALUE", **common)
    else:
        convert = _value_parser(kinds)
        section.add_argument(
            flag_of(name), type=convert, metavar=_metavar(info, kinds, name), **common
        )


def _kinds(annotation: Any) -> set[Any]:
    """The plain types that a field takes: Optional, unions, Literal and generics taken apart."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return set().union(*(_kinds(item) for item in get_args(annotation)))
    if origin is Literal:
        return {Literal}
    return {origin or annotation}


def _value_parser(kinds: set[Any]) -> Any:
    """Text to value; what only pydantic can judge (numbers, choices) stays text."""
    optional = type(None) in kinds

    def convert(text: str) -> Any:
        if optional and text.lower() == "none":
            return None
        if dict in kinds and (str not in kinds or text.lstrip().startswith("{")):
            return _json_dict(text)
        return text

    return convert


def _json_dict(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"is not valid JSON ({error}): {text}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object such as {{...}}, not {text}")
    return value


def _metavar(info: FieldInfo, kinds: set[Any], name: str) -> str:
    if Literal in kinds:
        choices = [str(item) for item in _literal_values(info.annotation)]
        return "{" + ",".join(choices) + "}"
    if dict in kinds:
        return "JSON" if str not in kinds else "JSON_OR_FILE"
    if int in kinds:
        return "INT"
    return "FLOAT" if float in kinds else name.rsplit("_", 1)[-1].upper()


def _literal_values(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(value for item in get_args(annotation) for value in _literal_values(item))


def _help(name: str, info: FieldInfo) -> str:
    text = " ".join((info.description or "").split())
    default = "" if info.default in (PydanticUndefined, None) else f", default {info.default}"
    return f"{text} ({class_of(name)}{default})".replace("%", "%%")


def unknown(token: str, parser: argparse.ArgumentParser, more: Iterable[str] = ()) -> str:
    """The sentence about an argument that nobody takes, with the nearest flag.

    Args:
        more: flags that are known besides the parser's.
    """
    if token.startswith(LONG_DASHES):
        plain = token.lstrip("".join(LONG_DASHES) + "-")
        return f"unexpected argument {token}: it begins with a long dash; write --{plain}"
    if not token.startswith("-"):
        return f"unexpected argument {token}: values follow a flag, as in --seed 7"
    flag = token.partition("=")[0]
    known = [*option_strings(parser), *more]
    close = nearest(flag.lstrip("-"), [option.lstrip("-") for option in known])
    hint = f"did you mean --{close}?" if close else f"`{parser.prog} --help` lists all flags"
    return f"unknown flag {flag}: {hint}"


def option_strings(parser: argparse.ArgumentParser) -> list[str]:
    """Every flag that a parser takes."""
    options = [option for action in parser._actions for option in action.option_strings]
    return [option for option in options if option not in (MEGATRON_PLACE, SGLANG_PLACE)]
