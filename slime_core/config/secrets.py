"""Values that nobody else may see, by the names of their keys."""

from __future__ import annotations

import re
from typing import Any

from slime_core.config.tree import RunConfig

HIDDEN = "***"
SECRET = re.compile(
    r"(^|_)(api_?key|access_?key|secret|password|passwd|credentials?|(auth|hf|bearer)_token)($|_)"
)


def is_secret(key: str) -> bool:
    """Whether a key's value looks like a secret: `api_key`, `hf_token`, `password`."""
    return SECRET.search(key.lower().replace("-", "_")) is not None


def hidden(config: RunConfig) -> RunConfig:
    """The configuration as others may see it: secrets among the engines' options are hidden."""
    return config.model_copy(update={"sglang": _hidden(config.sglang)})


def _hidden(options: dict[str, Any]) -> dict[str, Any]:
    return {
        key: HIDDEN if is_secret(key) else _hidden(value) if isinstance(value, dict) else value
        for key, value in options.items()
    }
