"""What commands that read a store share: where it is, and which run is meant."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_core.config.flags import FlagParser
from slime_core.errors import ConfigError
from slime_core.run.overview import find_run
from slime_core.run.paths import RunPaths, store_url
from slime_core.store.backend import Backend, join_url, open_backend
from slime_core.store.cache import NodeCache

WORKSPACE = "runs"
AWAY_PATIENCE_S = 5.0
"""How long commands ask a store that is away which also know runs from their notes of a pause."""


def parser(name: str, about: str | None, *, run: bool = True) -> FlagParser:
    """A parser with the flags that all of these commands have."""
    made = FlagParser(prog=f"slime {name}", description=about)
    if run:
        made.add_argument("run", metavar="RUN", help="id, its beginning, or `last`")
    made.add_argument("--workspace", default=WORKSPACE, help="folder that holds the runs")
    made.add_argument("--store-url", help="URL of the store, where it is not in the workspace")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    return made


def root_url(options: argparse.Namespace) -> str:
    """Where all runs are stored."""
    return store_url(options.workspace, options.store_url)


def place_flags(options: argparse.Namespace) -> str:
    """` --workspace W --store-url U`, as far as another command on the same run needs them."""
    flags: list[str] = []
    if options.workspace != WORKSPACE:
        flags += ["--workspace", options.workspace]
    if options.store_url:
        flags += ["--store-url", options.store_url]
    return f" {shlex.join(flags)}" if flags else ""


def open_root(
    options: argparse.Namespace, *, write: bool = False, patience_s: float | None = None
) -> Backend:
    """The store of all runs; a folder that is not there is not made.

    Args:
        write: without it nothing is created there, so reading is enough of a right.
        patience_s: how long a store that is away is asked again, as in `open_backend`.
    """
    url = root_url(options)
    if "://" not in url and not is_folder(Path(url)):
        raise ConfigError(
            f"{url} is not there, or you may not read it: give the --workspace or the --store-url "
            "of the run"
        )
    return open_backend(url, read_only=not write, patience_s=patience_s)


def open_run(
    options: argparse.Namespace,
    *,
    write: bool = False,
    fsync: bool = False,
    patience_s: float | None = None,
) -> tuple[str, NodeCache]:
    """The chosen run's id and its store, read through this node's cache where that can be kept.

    Args:
        fsync: what is written is on the disk before anything is deleted that it takes the place of.
    """
    root = open_root(options, write=write, patience_s=patience_s)
    run_id = find_run(root, options.run)
    url = join_url(root_url(options), run_id)
    backend = open_backend(url, fsync=fsync, read_only=not write, patience_s=patience_s)
    folder = RunPaths(Path(options.workspace).absolute(), run_id).cache
    return run_id, NodeCache(backend, folder if _can_be_kept(folder) else None)


def _can_be_kept(folder: Path) -> bool:
    """Whether this user may write a folder, or make it."""
    there = next(place for place in (folder, *folder.parents) if os.access(place, os.F_OK))
    return is_folder(there) and os.access(there, os.W_OK | os.X_OK)


def is_folder(path: Path) -> bool:
    """Also False where a folder above may not be entered."""
    try:
        return path.is_dir()
    except PermissionError:
        return False


def show(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Prints rows as a table, or as one JSON object a line."""
    if as_json:
        for row in rows:
            print(json.dumps(row, default=str))
        return
    if not rows:
        return
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for line in [names, *cells]:
        print("  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
