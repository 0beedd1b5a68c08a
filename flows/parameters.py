"""Parameters of deployments: Prefect hands over what a command or a form gave, of any type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.errors import ConfigError


def as_text(name: str, value: Any) -> str:
    """A text; a whole number counts as one, since `-p version=3` is JSON.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"{name} must be text, not {value!r}")
    return str(value)


def as_tree(name: str, value: Any) -> dict[str, Any]:
    """Keys and values.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f'{name} must be a JSON object such as {{"lr": 1e-4}}, not {value!r}')
    return dict(value)
