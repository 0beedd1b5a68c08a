"""The configuration with which a run was last started."""

from __future__ import annotations

from typing import Any

from slime_core.config.loading import apply_overrides, build_config
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.documents import read_document


def last_config(run: Backend, overrides: dict[str, Any]) -> RunConfig:
    """The newest recorded configuration, with single values put over it.

    SGLang's own options are not recorded, since they may hold keys: give them again.

    Args:
        run: the store below the run's prefix.

    Raises:
        ConfigError: nothing is recorded.
    """
    entries = run.list(layout.CONFIGS)
    if not entries:
        raise ConfigError(f"{run.url} holds no configuration: start it with `slime train` again")
    newest = max(entries, key=lambda entry: entry.modified_s)
    tree = read_document(run, newest.key).body["config"]
    return build_config(apply_overrides(tree, overrides))
