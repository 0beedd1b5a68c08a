"""Field lookup: unique names over the tree, their classes and digests."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slime_core.config.parallel import layout_of, without_layout
from slime_core.config.tree import RunConfig
from slime_core.refs import digest_of

FieldClass = Literal["identity", "numeric", "operational"]
OPEN_GROUPS = ("megatron", "sglang")
ADDED = ("prompt_data_weights", "data_source_path", "multimodal_keys", "debug_rollout_only")
"""Identity fields that runs of the first release lack: they count where they are set, so that such
runs are still found."""


@cache
def group_types() -> dict[str, type[BaseModel]]:
    """Group name -> its model, without the two open dicts."""
    found: dict[str, type[BaseModel]] = {}
    for name, info in RunConfig.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found[name] = info.annotation
    return found


@cache
def field_groups() -> dict[str, str]:
    """Field name -> group name. Names are unique over the tree."""
    found: dict[str, str] = {}
    for group, model in group_types().items():
        for name in model.model_fields:
            if name in found:
                raise AssertionError(f"field {name} stands in {found[name]} and in {group}")
            found[name] = group
    return found


def field_info(name: str) -> FieldInfo:
    """Type, default and description of a field."""
    return group_types()[field_groups()[name]].model_fields[name]


def class_of(name: str) -> FieldClass:
    """identity, numeric or operational."""
    for mark in field_info(name).metadata:
        if mark in ("identity", "numeric", "operational"):
            return mark
    raise AssertionError(f"field {name} has no class")


def values(config: RunConfig, field_class: FieldClass) -> dict[str, Any]:
    """All fields of one class with their values, open groups included: of Megatron's options, the
    parallel layout is operational, the others are numeric."""
    found = {
        name: getattr(getattr(config, group), name)
        for name, group in field_groups().items()
        if class_of(name) == field_class
    }
    found = {
        name: value
        for name, value in found.items()
        if name not in ADDED or value not in (None, False)
    }
    if field_class == "numeric":
        found["megatron"] = without_layout(config.megatron)
    if field_class == "operational":
        found["sglang"] = config.sglang
        found["megatron"] = layout_of(config.megatron)
    return found


def numeric_digest(config: RunConfig) -> str:
    """Digest of what shapes the numbers of training from the next iteration on."""
    return digest_of(values(config, "numeric"))


def numeric_changes(before: RunConfig, after: RunConfig) -> list[str]:
    """What differs of that, as "lr 0.0003 -> 0.0001", Megatron's options by their own names."""
    old, new = (
        {**found.pop("megatron"), **found}
        for found in (values(before, "numeric"), values(after, "numeric"))
    )
    return [
        f"{name} {old.get(name, 'unset')} -> {new.get(name, 'unset')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def identity_digest(config: RunConfig) -> str:
    """Digest of what makes this run this run."""
    return digest_of(values(config, "identity"))
