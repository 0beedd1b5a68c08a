"""From YAML, `extends` and overrides to a checked RunConfig."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter, ValidationError

from slime_core.config.aliases import aliases, own_names, own_names_in_tree
from slime_core.config.base import MOST_INTEGER
from slime_core.config.expected import expected
from slime_core.config.fields import OPEN_GROUPS, field_groups, field_info, group_types
from slime_core.config.known_flags import why_not
from slime_core.config.strict_yaml import RefusedYaml, load
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError
from slime_core.near import nearest


def load_config(source: str | Path | dict[str, Any], overrides: dict[str, Any]) -> RunConfig:
    """Reads a YAML file (or takes its content) and applies single values over it.

    Args:
        source: path of a YAML file, or the tree as a dict, whose `./` is the working directory.
        overrides: field name (without group) -> value; `megatron` and `sglang` are merged.

    Raises:
        ConfigError: a missing file, an unknown key (with the nearest known one), a wrong type or
            a broken rule.
    """
    if isinstance(source, dict):
        source = own_names_in_tree(source)
        _check_keys(source, "configuration")
        tree = _extended(_absolute_paths(source, Path()), Path(), "configuration", ())
        return build_config(apply_overrides(tree, overrides), given=overrides)
    tree = read_tree(Path(source))
    return build_config(apply_overrides(tree, overrides), str(source), overrides)


def read_tree(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Reads one YAML file and what it extends; paths in it are relative to its folder."""
    real = path.resolve()
    if real in seen:
        circle = " -> ".join(map(str, [*seen[seen.index(real) :], real]))
        raise ConfigError(f"{path}: `extends` goes in a circle: {circle}")
    tree = _read_yaml(path, "configuration file")
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold groups such as `run:` and `data:`")
    tree = own_names_in_tree(tree)
    _check_keys(tree, str(path))
    tree = _absolute_paths(tree, path.parent)
    return _extended(tree, path.parent, str(path), (*seen, real))


def _read_yaml(path: Path, what: str) -> Any:
    try:
        return load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such {what}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read, it is not a text file (UTF-8)") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{yaml_fault(error)}") from error


def _with_custom_file(tree: dict[str, Any]) -> dict[str, Any]:
    """Puts the content of a YAML file for its path, as slime's --custom-config-path names it."""
    rollout = tree.get("rollout")
    if not isinstance(rollout, dict) or not isinstance(rollout.get("custom_config"), str):
        return tree
    path = Path(rollout["custom_config"])
    content = _read_yaml(path, "file for custom_config")
    if not isinstance(content, dict):
        raise ConfigError(f"custom_config {path}: must hold keys and values")
    return {**tree, "rollout": {**rollout, "custom_config": content}}


def _extended(
    tree: dict[str, Any], folder: Path, where: str, seen: tuple[Path, ...]
) -> dict[str, Any]:
    """Puts a tree over the file that it extends, if it does."""
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str) or "\0" in base:
        raise ConfigError(f"{where}: `extends` takes the path of one YAML file, not {base!r}")
    return _merge(read_tree(folder / base, seen), tree)


def apply_overrides(tree: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Puts single values, named without their group, over the tree."""
    groups = field_groups()
    problems = []
    for name, value in own_names(overrides).items():
        if name in OPEN_GROUPS:
            tree = _merge(tree, {name: value})
        elif name in groups:
            tree = {**tree, groups[name]: {**tree.get(groups[name], {}), name: value}}
        else:
            known = [*groups, *OPEN_GROUPS, *aliases()]
            problems.append(why_not(name, name) or str(unknown_name(name, known, "option")))
    if problems:
        raise ConfigError("\n".join(problems))
    return tree


def build_config(tree: dict[str, Any], file: str = "", given: Collection[str] = ()) -> RunConfig:
    """Validates the tree; every problem becomes one line of a ConfigError.

    Args:
        file: where the tree was read, for messages.
        given: names of fields whose values came from elsewhere (flags, a form).
    """
    _check_keys(tree, "configuration")
    tree = _with_custom_file(tree)
    needed = {name: {} for name, info in RunConfig.model_fields.items() if info.is_required()}
    try:
        return RunConfig.model_validate(needed | {k: v for k, v in tree.items() if k != "extends"})
    except ValidationError as error:
        raise ConfigError("\n".join(_sentences(error, file, given))) from error


def value_problems(values: Mapping[str, Any], file: str = "") -> list[str]:
    """What is wrong with single values, each by itself: where a tree cannot be made yet.

    Args:
        file: where they were read; without it they are named as flags.
    """
    problems: list[str] = []
    for name, value in values.items():
        group = field_groups().get(name)
        if group is None:
            continue
        info = field_info(name)
        kind: Any = Annotated[info.annotation, *info.metadata]
        try:
            TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            item = {**error.errors()[0], "type": "value", "input": value}
            problems.append(_sentence((group, name), item, file, () if file else values))
    return problems


def yaml_fault(error: yaml.YAMLError) -> str:
    """Where a YAML file breaks, to be read behind its path."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, RefusedYaml) and mark is not None:
        return f", line {mark.line + 1}: {error.problem}"
    if mark is None:
        return " is not valid YAML: only text can be read"
    problem = str(getattr(error, "problem", ""))
    if "another document" in problem:
        return f", line {mark.line + 1}: a second document begins with `---`: keep one"
    if isinstance(error, yaml.constructor.ConstructorError):
        return f", line {mark.line + 1}: only plain values are read, no tags such as `!!python/...`"
    if "'\\t'" in problem:
        return f", line {mark.line + 1}: YAML is indented with spaces, not with tabs"
    return (
        f", line {mark.line + 1}, column {mark.column + 1} is not valid YAML: look there, and in "
        "the line before, for a missing bracket, quote, colon or space"
    )


def unknown_name(name: str, known: list[str], what: str) -> ConfigError:
    """An error that gives the nearest known name."""
    close = nearest(name, known)
    hint = f": did you mean {close}?" if close else ""
    return ConfigError(f"unknown {what} {name}{hint}")


def _check_keys(tree: dict[str, Any], where: str) -> None:
    """Refuses every key that is unknown or stands in the wrong place, one line each."""
    problems: list[str] = []
    known: dict[str, Any] = {}
    for group, content in tree.items():
        if group not in RunConfig.model_fields and group != "extends":
            problems.append(_no_group(str(group)))
        elif (model := group_types().get(group)) is None:
            continue
        elif not isinstance(content, dict):
            problems.append(f"`{group}:` must hold keys and values")
        else:
            unknown = [str(key) for key in content if key not in model.model_fields]
            problems += [_misplaced(key, group) for key in unknown]
            known |= {key: value for key, value in content.items() if key in model.model_fields}
    if problems:  # what the right keys hold is told with them, so that nobody has to come twice
        lines = [f"{where}: {problem}" for problem in problems] + value_problems(known, where)
        raise ConfigError("\n".join(lines))


def _no_group(name: str) -> str:
    fields = field_groups()
    if name in fields:
        return f"{name} belongs under `{fields[name]}:`"
    known = [*RunConfig.model_fields, "extends"]
    return why_not(name, name) or str(unknown_name(name, known, "key"))


def _misplaced(key: str, group: str) -> str:
    fields = field_groups()
    if key in fields:
        return f"{key} stands under `{group}:` but belongs under `{fields[key]}:`"
    if reason := why_not(key, key):
        return reason
    return str(unknown_name(key, list(fields), f"key in `{group}:`"))


def _absolute_paths(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Makes `./` and `../` paths of a file relative to that file's folder."""

    def fix(value: Any) -> Any:
        if isinstance(value, str) and value.startswith(("./", "../")):
            return str((folder / value).resolve())
        if isinstance(value, dict):
            return {key: fix(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fix(item) for item in value]
        return value

    return {key: value if key == "extends" else fix(value) for key, value in tree.items()}


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = (
            {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged


def _sentences(error: ValidationError, file: str, given: Collection[str]) -> list[str]:
    """One sentence for each field, also where a value may have several types and fits none."""
    found: dict[tuple[Any, ...], Any] = {}
    for item in error.errors():
        found.setdefault(item["loc"][:2], item)
    return [_sentence(place, item, file, given) for place, item in found.items()]


def _sentence(place: tuple[Any, ...], item: Any, file: str, given: Collection[str]) -> str:
    name, key = str(place[-1]) if place else "", ".".join(map(str, place))
    if item["type"] == "missing":
        return f"{key} is missing: set it in the YAML file or as --{name.replace('_', '-')}"
    if item["type"] == "value_error":
        return item["msg"].removeprefix("Value error, ")
    model = group_types().get(str(place[0]))
    if model is None and len(place) > 1:
        return f"{place[0]}: names of options are text, not {place[1]!r}"
    info = model.model_fields[name] if model and len(place) > 1 else None
    wanted = expected(info) if info else "keys and values"
    shown = f"--{name.replace('_', '-')}" if name in given else f"{file}: {key}" if file else key
    if item["type"] == "integer_size":
        wanted += f" (and within {MOST_INTEGER})"
    return f"{shown} must be {wanted}, not {item['input']!r}"
