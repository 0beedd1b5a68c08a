"""`slime logs RUN`: what the processes of a run have logged, in the order of time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from flows.cli.stored import open_run, parser
from flows.services.runs import live_run
from slime_core.config.flags import parse
from slime_core.errors import ConfigError
from slime_core.run.log_lines import LogFiles, LogLine
from slime_core.run.paths import RunPaths
from slime_core.store.backend import Backend

SOURCES = ("driver", "supervisor", "trainer", "rollout", "engine")
LOOK_S = 0.5
OWNER_S = 5.0


def main(arguments: list[str]) -> int:
    """Prints the newest lines; with --follow also what comes, until the run ends."""
    made = parser("logs", __doc__)
    made.add_argument("--source", choices=SOURCES, help="only the logs of these processes")
    made.add_argument("--lines", type=int, default=200, help="how many of the newest lines (200)")
    made.add_argument("--follow", action="store_true", help="go on until the run ends")
    options = parse(made, arguments)
    run_id, cache = open_run(options)
    folder = RunPaths(Path(options.workspace).absolute(), run_id).logs
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not there: logs lie on the machine, and in the workspace, of the run"
        )
    files = LogFiles(folder, (options.source,) if options.source else SOURCES)
    lines = files.read()
    _print(lines[-options.lines :] if options.lines > 0 else [])
    if options.follow:
        _follow(files, cache.backend, run_id)
    return 0


def _follow(files: LogFiles, run: Backend, run_id: str) -> None:
    """Prints new lines until the run has no owner any more."""
    alive, looked_s = True, 0.0
    while alive:
        if time.monotonic() - looked_s > OWNER_S:
            alive, looked_s = live_run(run, run_id) is not None, time.monotonic()
        _print(files.read())
        if alive:
            time.sleep(LOOK_S)


def _print(lines: Sequence[LogLine]) -> None:
    for line in lines:
        at = line.time.astimezone()
        print(f"{at:%Y-%m-%d %H:%M:%S} {line.source:<10} {line.message}", flush=True)
