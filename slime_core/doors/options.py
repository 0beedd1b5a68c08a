"""Flags that are no fields: SGLang's, Megatron's classic names, other names of fields."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

import yaml

from slime_core.config.aliases import aliases
from slime_core.config.flags import SGLANG_PREFIX
from slime_core.config.known_flags import why_not
from slime_core.engines.sglang_options import option_list
from slime_core.errors import ConfigError
from slime_core.megatron.arguments import known_names, option_type, place_of

Many = Literal["none", "one", "many"]
SWITCHES = (
    "use_fault_tolerance", "log_passrate", "log_multi_turn", "log_correct_samples",
    "no_offload_rollout",
)  # fmt: skip
"""What slime switches on, or off, and what is always so here."""
# Values of slime's flags that say what happens anyway; all others of these flags are answered.
ALREADY = {
    "train_backend": "megatron",
    "update_weight_mode": "full",
    "update_weights_interval": "1",
}


@dataclass(frozen=True)
class Option:
    """Where a flag belongs and how its values are read.

    Attributes:
        place: "megatron", "sglang", "" for another name of a field, or "already" for what happens
            anyway.
        name: with underscores, without prefix.
        many: whether it takes no value, one or all that follow.
        type: of a Megatron option.
        value: what the bare flag means.
    """

    place: Literal["megatron", "sglang", "already", ""]
    name: str
    many: Many
    type: Any = str
    value: Any = True

    def read(self, texts: Sequence[str]) -> Any:
        """The value.

        Raises:
            ConfigError: too few or too many values, or text of another type.
        """
        flag = self.flag
        if self.many == "none":
            if texts:
                raise ConfigError(f"{flag} is a switch, so it takes no value such as {texts[0]}")
            return self.value
        if not texts and self.place == "sglang":
            return True
        if not texts:
            raise ConfigError(f"{flag} needs a value")
        if self.place == "already":
            if texts != [self.type]:
                raise ConfigError(why_not(self.name) or f"{flag} can only be {self.type}")
            return texts[0]
        read = _yaml if self.place == "sglang" else _reader(self.type)
        if self.many == "many":
            values = [read(flag, text) for text in texts]
            alone = self.place == "megatron" and len(_members(self.type)) > 1
            return values[0] if alone and len(values) == 1 else values
        if len(texts) > 1:
            raise ConfigError(f"unexpected argument {texts[1]}: {flag} takes one value")
        return read(flag, texts[0])

    @property
    def flag(self) -> str:
        prefix = SGLANG_PREFIX if self.place == "sglang" else "--"
        return prefix + self.name.replace("_", "-")


def option_of(flag: str) -> Option | None:
    """The option that a flag (`--norm-epsilon`) means; None where it is none of these.

    Raises:
        ConfigError: a flag of slime's that is not there yet, or refused, with the reason.
    """
    name = flag.removeprefix("--").replace("-", "_")
    if name in aliases():
        return Option("", name, "one")
    if name in ALREADY:
        return Option("already", name, "one", ALREADY[name])
    if name in SWITCHES:
        return Option("already", name, "none")
    if reason := why_not(name) or why_not(name.removeprefix("no_"), flag):
        raise ConfigError(reason)
    if flag.startswith(SGLANG_PREFIX):
        return _sglang(name.removeprefix("sglang_"))
    if place := place_of(name):
        raise ConfigError(f"{flag} is set by {place}")
    if name in known_names():
        return _megatron(name, option_type(name))
    positive = name.removeprefix("no_")
    if positive != name and positive in known_names() and option_type(positive) is bool:
        return Option("megatron", positive, "none", bool, value=False)
    return None


def more_flags() -> Iterable[str]:
    """Every flag that option_of knows, for suggestions."""
    yield from (f"--{name.replace('_', '-')}" for name in (*aliases(), *known_names()))


def _sglang(name: str) -> Option:
    kind = option_list().kinds.get(name, "any")
    return Option("sglang", name, "many" if kind == "list" else "one")


def _megatron(name: str, kind: Any) -> Option:
    members = _members(kind)
    if bool in members and len(members) == 1:
        return Option("megatron", name, "none", bool)
    return Option("megatron", name, "many" if list in members else "one", kind)


def _members(kind: Any) -> set[Any]:
    """The plain types of a union, without None; generics without their parameters."""
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        found = [_members(item) for item in typing.get_args(kind)]
        return set().union(*found) - {type(None), None}
    return {origin or kind}


def _reader(kind: Any) -> Any:
    members = _members(kind)
    # It may be one of the choices, or a word like any other beside a list.
    word = Literal in members or {str, list} <= members

    def read(flag: str, text: str) -> Any:
        if text.lower() == "none" and not word:
            return None
        if list in members and text.startswith("["):
            return _yaml(flag, text)
        for plain, words in ((int, "a whole number"), (float, "a number")):
            if plain not in members:
                continue
            try:
                return plain(text)
            except ValueError as error:
                if members <= {int, float} and plain is max(members, key=_width):
                    raise ConfigError(f"{flag} must be {words}, not {text!r}") from error
        return _plain(text) if list in members or Any in members else text

    return read


def _width(kind: type) -> int:
    return 1 if kind is float else 0


def _plain(text: str) -> Any:
    """A number where the text is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _yaml(flag: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{flag}: {text!r} cannot be read as a value") from error
