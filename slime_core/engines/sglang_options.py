"""SGLang's server options by name and kind, for machines where SGLang is not installed.

The list lies in sglang_options.json; it is made anew in an environment with SGLang by
`python -m slime_core.engines.sglang_options > slime_core/engines/sglang_options.json`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slime_core.engines.launcher import EMBEDDED_OPTIONS
from slime_core.near import nearest

LIST = Path(__file__).with_suffix(".json")
KINDS = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "size": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "list": ((list, str, int, float), "a list"),
}
SHORT_SIZE = re.compile(r"\d+(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)")
OF_THE_LAUNCHER = ("model_path", "model", "host", "port")


@dataclass(frozen=True)
class OptionList:
    """The options of one SGLang version: name -> bool, int, size (also as 8k), float, str, list
    or any."""

    version: str
    kinds: Mapping[str, str]


@cache
def option_list() -> OptionList:
    """The list that is shipped."""
    content = json.loads(LIST.read_text(encoding="utf-8"))
    return OptionList(content["sglang"], content["options"])


def option_problems(options: Mapping[str, Any], *, embedded: bool = False) -> list[str]:
    """What is wrong with options for an engine, one sentence each: unknown names, wrong types.

    Args:
        embedded: the embedded engine gets them, which takes sizes as plain numbers only.
    """
    found = [_problem(name, value, embedded) for name, value in options.items()]
    return [sentence for sentence in found if sentence]


def needs_sglang(options: Mapping[str, Any]) -> list[str]:
    """Known options that the embedded engine ignores, sorted."""
    return sorted(set(options) & set(option_list().kinds) - EMBEDDED_OPTIONS)


def _problem(name: str, value: Any, embedded: bool) -> str | None:
    known = option_list()
    flag = f"--sglang-{name.replace('_', '-')}"
    if name in OF_THE_LAUNCHER:
        return f"{flag} is set by the launcher: remove it"
    if name not in known.kinds:
        close = nearest(name, known.kinds)
        hint = f"did you mean --sglang-{close.replace('_', '-')}?" if close else "remove it"
        return f"{flag} is no option of SGLang {known.version}: {hint}"
    kind = known.kinds[name]
    if kind == "size" and not embedded and SHORT_SIZE.fullmatch(str(value)):
        return None
    types, words = KINDS.get(kind, (object, ""))
    fits = isinstance(value, types) and (types is bool or types is object or value is not True)
    if fits or value is None or value is False:
        return None
    return f"{flag} must be {words}, not {value!r}"


def _kind(action: argparse.Action) -> str:
    """The kind of one flag of SGLang's own parser."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return "bool"
    if action.nargs is not None:
        return "list"
    name = getattr(action.type, "__name__", "str" if action.type is None else "any")
    if name == "human_readable_int":
        return "size"
    return name if name in ("int", "float", "str") else "any"


def _make() -> str:
    """The list of the installed SGLang as JSON."""
    from importlib.metadata import version

    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = {
        flag.removeprefix("--").replace("-", "_"): _kind(action)
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--") and flag != "--help"
    }
    content = {"sglang": version("sglang"), "options": dict(sorted(options.items()))}
    return json.dumps(content, indent=0)


if __name__ == "__main__":
    sys.stdout.write(_make() + "\n")
