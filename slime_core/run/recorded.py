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
    """The configuration of the iteration that was trained last, with single values put over it.
    Of a run without an iteration: the one that was recorded last.

    SGLang's own options are not recorded, since they may hold keys: give them again.

    Args:
        run: the store below the run's prefix.

    Raises:
        ConfigError: nothing is recorded.
    """
    tree = read_document(run, _newest(run)).body["config"]
    return build_config(apply_overrides(tree, overrides))


def _newest(run: Backend) -> str:
    """Key of the configuration."""
    entries = {entry.key: entry.modified_s for entry in run.list(layout.CONFIGS)}
    if not entries:
        raise ConfigError(f"{run.url} holds no configuration: start it with `slime train` again")
    found = (layout.parse_iteration(entry.key) for entry in run.list(layout.ITERATIONS))
    trained = [item[0] for item in found if item is not None and item[1] == "ledger"]
    if trained:
        key = layout.config(read_document(run, layout.ledger(max(trained))).body["numeric"])
        if key in entries:
            return key
    return max(entries, key=lambda key: entries[key])
