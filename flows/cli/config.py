"""`slime config show | diff | schema | from-script`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from slime_core.config.fields import class_of, field_groups
from slime_core.config.flags import FlagParser, add_flags, overrides_of, parse
from slime_core.config.loading import load_config
from slime_core.config.secrets import hidden
from slime_core.config.tree import RunConfig
from slime_core.doors.command_line import parse as parse_line
from slime_core.errors import ConfigError
from slime_core.near import nearest

USAGE = """usage: slime config show CONFIG.yaml [--flag value ...]
       slime config diff ONE.yaml OTHER.yaml
       slime config schema
       slime config from-script run.sh [--out run.yaml]

show prints the whole configuration as it is understood, diff the fields that differ, schema the
JSON schema of a configuration. from-script reads a launch script of slime without running it."""


def main(arguments: list[str]) -> int:
    """Runs one of them."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        close = nearest(name, COMMANDS)
        hint = f"did you mean {close}?" if close else f"there are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command slime config {name}: {hint}")
    return COMMANDS[name](rest)


def show(arguments: list[str]) -> int:
    """Prints the whole tree as YAML, defaults included; what looks like a secret is hidden."""
    parser = FlagParser(prog="slime config show", usage="slime config show CONFIG.yaml [--flag v]")
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    add_flags(parser)
    parsed = parse_line(parser, arguments)
    config = load_config(parsed.config or {}, overrides_of(parsed))
    print(yaml.safe_dump(hidden(config).model_dump(), sort_keys=False, allow_unicode=True), end="")
    return 0


def diff(arguments: list[str]) -> int:
    """Prints the fields that differ with their class; exits with 1 if any do, as diff does."""
    parser = FlagParser(prog="slime config diff")
    parser.add_argument("one", metavar="ONE.yaml")
    parser.add_argument("other", metavar="OTHER.yaml")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parsed = parse(parser, arguments)
    one, other = (_flat(load_config(path, {})) for path in (parsed.one, parsed.other))
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    width = max(map(len, names), default=0)
    for name in names:
        before, after = _text(one.get(name)), _text(other.get(name))
        print(f"{name:<{width}}  {_class(name):<11}  {before} -> {after}")
    if not names:
        print("no field differs")
    return 1 if names else 0


def schema(arguments: list[str]) -> int:
    """Prints the JSON schema of a file: it may extend another, and hold a part of the fields."""
    parser = FlagParser(prog="slime config schema")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parse(parser, arguments)
    found = RunConfig.model_json_schema()
    found["properties"]["extends"] = {"type": "string", "description": "a file to put this over"}
    for part in (found, *found["$defs"].values()):
        part.pop("required", None)
    print(json.dumps(found, indent=2, ensure_ascii=False))
    return 0


def from_script(arguments: list[str]) -> int:
    """Writes the YAML of a launch script, and says what of it has no meaning here."""
    from slime_core.doors.convert import convert

    parser = FlagParser(prog="slime config from-script")
    parser.add_argument("script", metavar="run.sh", help="a launch script of slime; it is not run")
    parser.add_argument("--out", metavar="FILE", help="where the YAML goes; default: printed")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parsed = parse(parser, arguments)
    found = convert(Path(parsed.script))
    if parsed.out is None:
        print(found.yaml, end="")
    else:
        _write_new(Path(parsed.out), found.yaml)
        print(f"wrote {parsed.out}; look at it with: slime check {parsed.out}")
    for line in found.report:
        print(line, file=sys.stderr)
    return 0


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists: remove it, or choose another --out") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _flat(config: RunConfig) -> dict[str, Any]:
    """Field -> value; the open groups by `megatron.NAME`."""
    tree = hidden(config).model_dump()
    found = {name: tree[group][name] for name, group in field_groups().items()}
    for group in ("megatron", "sglang"):
        found |= {f"{group}.{name}": value for name, value in tree[group].items()}
    return found


def _class(name: str) -> str:
    if name in field_groups():
        return class_of(name)
    return "numeric" if name.startswith("megatron.") else "operational"


def _text(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "show": show,
    "diff": diff,
    "schema": schema,
    "from-script": from_script,
}
