"""`block:NAME` as a value: which fields take one, and which blocks a configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime_core.config.fields import OPEN_GROUPS, field_groups
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError

PREFIX = "block:"
FIELDS = ("store_url", "mlflow_tracking_uri", "grader_secrets", "ray_address")


def blocks_in(config: RunConfig) -> dict[str, str]:
    """Field -> name of the block that it names.

    Raises:
        ConfigError: a field names a block and cannot take one, or holds a secret itself.
    """
    found = {}
    for name, value in _strings(config):
        if not value.startswith(PREFIX):
            continue
        if name not in FIELDS:
            raise ConfigError(f"{name}: {value}: only {', '.join(FIELDS)} can name a block")
        found[name] = value.removeprefix(PREFIX)
    if config.rewards.grader_secrets is not None and "grader_secrets" not in found:
        raise ConfigError("grader_secrets takes block:NAME, so that no secret stands in a file")
    return found


def _strings(config: RunConfig) -> Iterator[tuple[str, str]]:
    for name, group in field_groups().items():
        yield from _inside(name, getattr(getattr(config, group), name))
    for name in OPEN_GROUPS:
        yield from _inside(name, getattr(config, name))


def _inside(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _inside(name, item)
    elif isinstance(value, list):
        for item in value:
            yield from _inside(name, item)
