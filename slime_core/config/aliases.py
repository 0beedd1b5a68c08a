"""Other names of fields: `tis_threshold` is tis_clip, `save` is store_url."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from slime_core.config.fields import field_groups
from slime_core.config.known_flags import known_flags
from slime_core.errors import ConfigError
from slime_core.weights.megatron_folder import is_megatron

STARTS = ("load", "initial_megatron_checkpoint")
"""Where slime takes the first weights from."""


@cache
def aliases() -> Mapping[str, str]:
    """Other name -> field."""
    fields = field_groups()
    return {
        row.name: row.field
        for row in known_flags().values()
        if row.status == "works" and row.name != row.field and row.field in fields
    }


def own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values under the names of their fields.

    slime's usual pair `--load X --save X` means: go on with what was saved there. Every run does
    that, so such a load is left out.

    Raises:
        ConfigError: two names of one field with two values.
    """
    found, conflicts = _renamed(values)
    if conflicts:
        raise ConfigError("\n".join(conflicts))
    return found


def name_conflicts(values: Mapping[str, Any]) -> list[str]:
    """A sentence for each field that is given under two names with two values."""
    return _renamed(values)[1]


def _renamed(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    known, conflicts = aliases(), []
    found = {name: value for name, value in values.items() if name not in known}
    for name, value in values.items():
        if name not in known or (name == "load" and _same(value, values.get("save"))):
            continue
        field = known[name]
        if name in STARTS and is_megatron(Path(str(value))):
            field = "megatron_load"
        if field in found and not _same(found[field], value):
            fix = f"leave {name} out" if name in STARTS else "give one of them"
            conflicts.append(
                f"{name} is another name of {field}, and they differ: {value!r} and "
                f"{found[field]!r}; {fix}"
            )
        found[field] = value
    return found, conflicts


def own_names_in_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a tree of groups."""
    return {
        group: own_names(content) if isinstance(content, dict) and group in groups() else content
        for group, content in tree.items()
    }


def groups() -> set[str]:
    """Names of the groups that hold fields."""
    return set(field_groups().values())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return one.rstrip("/") == other.rstrip("/")
    return one == other
