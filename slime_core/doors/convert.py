"""A launch script of slime as a configuration, and a report of what has no meaning here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter, ValidationError

from slime_core.config.aliases import own_names
from slime_core.config.fields import OPEN_GROUPS, field_info, group_types
from slime_core.config.flags import FlagParser, add_flags, overrides_of
from slime_core.config.loading import build_config
from slime_core.config.tree import RunConfig
from slime_core.doors.command_line import groups_of, parse
from slime_core.doors.script import read_script
from slime_core.errors import ConfigError
from slime_core.weights.megatron_folder import is_megatron

OWN_FLAG = {
    "--ref-load": "--ref-load",
    "--load": "--megatron-load",
    "--initial-megatron-checkpoint": "--megatron-load",
}
STARTS = ("--ref-load", "--load", "--initial-megatron-checkpoint", "--save")


@dataclass(frozen=True)
class Converted:
    """What became of a script.

    Attributes:
        tree: groups with the fields that the script sets.
        report: one line for each thing that was left out, read in another way, or is still to be
            decided.
    """

    source: str
    tree: dict[str, Any]
    report: list[str]

    @property
    def yaml(self) -> str:
        """The configuration as a file."""
        head = f"# From {self.source}.\n"
        return head + yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True)


def convert(path: Path, environment: Mapping[str, str] | None = None) -> Converted:
    """Converts a script without running it.

    Args:
        path: the script.
        environment: variables from outside; by default those of this process.

    Raises:
        ConfigError: the script cannot be followed to its train.py, with the line.
    """
    script = read_script(path, environment)
    report = list(script.notes)
    if script.entry == "train_async.py":
        report.append("train_async.py: asynchronous training is not there yet, this trains in turn")
    parser = FlagParser(prog="slime train")
    add_flags(parser)
    kept: list[str] = []
    for group in _starts(groups_of(script.arguments), report):
        try:
            parse(parser, group)
            kept += group
        except ConfigError as error:
            report.append(f"left out: {error}")
    try:
        given = own_names(overrides_of(parse(parser, kept)))
    except ConfigError as error:  # what fits alone and not together; all of it is told at once
        raise ConfigError("\n".join([str(error), *report])) from error
    values = _slimes_defaults(given, script.arguments)
    tree = _tree(values, path.stem)
    if any(str(value).startswith("./") for value in _values(tree)):
        report.append("paths that begin with ./ belong to the folder of the YAML file")
    return Converted(path.name, tree, [*report, *_open_questions(tree)])


def _slimes_defaults(values: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """Sizes that slime takes where a script says nothing, and that are others here."""
    found = {"actor_num_gpus_per_node": 8, **values}
    if "--colocate" in arguments and "rollout_num_gpus" not in values:
        sizes = [str(found.get(name, 1)) for name in ("actor_num_nodes", "actor_num_gpus_per_node")]
        if all(size.isdecimal() for size in sizes):  # a check tells of the others
            found["rollout_num_gpus"] = int(sizes[0]) * int(sizes[1])
    return found


def _starts(groups: list[list[str]], report: list[str]) -> list[list[str]]:
    """Takes checkpoint folders of Megatron's that are there, leaves out those that only their name
    tells of, and what a run finds by itself."""
    given = {group[0]: group[1].rstrip("/") for group in groups if len(group) == 2}
    kept = []
    for group in groups:
        flag, folder = group[0], given.get(group[0], "")
        if flag not in STARTS or not folder:
            kept.append(group)
        elif flag == "--load" and folder == given.get("--save"):
            report.append("--load and --save are one folder: a run goes on there by itself")
        elif flag != "--save" and folder == given.get("--hf-checkpoint"):
            report.append(f"{flag} {folder}: that is hf_checkpoint already")
        elif flag != "--save" and is_megatron(Path(folder)):
            kept.append(group)
        elif flag != "--save" and "torch_dist" in folder:
            report.append(
                f"left out: {flag} {folder}: it is not there to look at, so weights are read from "
                f"hf_checkpoint; if they differ, give {OWN_FLAG[flag]} where it is"
            )
        elif flag not in ("--save", "--ref-load") and "--hf-checkpoint" in given:
            report.append(f"left out: {flag} {folder}: training starts from hf_checkpoint")
        else:
            kept.append(group)
    return kept


def _tree(values: dict[str, Any], name: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for group in RunConfig.model_fields:
        if group in OPEN_GROUPS:
            found = dict(values.get(group, {}))
        else:
            fields = group_types()[group].model_fields
            found = {key: _typed(key, values[key]) for key in fields if key in values}
        if group == "run":
            found = {"run_name": name, **found}
        if found:
            tree[group] = found
    return tree


def _typed(name: str, value: Any) -> Any:
    """The value with the field's type; as it is where it does not fit, which a check will tell."""
    info = field_info(name)
    kind: Any = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return value


def _values(tree: dict[str, Any]) -> list[Any]:
    return [value for group in tree.values() for value in group.values()]


def _open_questions(tree: dict[str, Any]) -> list[str]:
    """What a check would still say about the configuration alone."""
    try:
        build_config(tree)
    except ConfigError as error:
        return [f"to decide: {line}" for line in str(error).splitlines()]
    return []
