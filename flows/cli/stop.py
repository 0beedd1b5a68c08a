"""`slime stop RUN`: ends a running training cleanly, wherever it was started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from flows.cli.stored import open_root, open_run, parser, place_flags, root_url
from flows.services.runs import LiveRun, live_run
from slime_core.config.flags import parse
from slime_core.errors import DeadlineError, SlimeError
from slime_core.run.overview import state_of
from slime_core.run.paths import RunPaths
from slime_core.run.stop_request import ask
from slime_core.store.backend import Backend
from slime_core.waits import poll

STOP_TIMEOUT_S = 30.0
ITERATION_TIMEOUT_S = 3600.0
ENDS = {"stopped": "has stopped already", "finished": "has finished", "killed": "was killed"}


class StopError(SlimeError):
    """A run cannot be stopped from here, or does not end."""


def main(arguments: list[str]) -> int:
    """Asks the run's process and waits for its end."""
    made = parser("stop", __doc__)
    made.add_argument(
        "--after-iteration", action="store_true", help="finish the iteration that it is in"
    )
    made.add_argument(
        "--timeout-s", type=float, help="how long to wait (30; 3600 with --after-iteration)"
    )
    options = parse(made, arguments)
    run_id, cache = open_run(options)
    live = live_run(cache.backend, run_id)
    if live is None:
        state = state_of(open_root(options), root_url(options), run_id)
        print(f"run {run_id} does not run: it {ENDS.get(state, f'is {state}')}")
        return 0
    if not live.here:
        raise StopError(
            f"run {run_id} belongs to {live.owner.describe()}: type `slime stop` on that machine"
        )
    if options.after_iteration:
        ask(RunPaths(Path(options.workspace).absolute(), run_id).local, live.epoch)
        limit_s = options.timeout_s or ITERATION_TIMEOUT_S
    else:
        os.kill(live.owner.pid, signal.SIGTERM)
        limit_s = options.timeout_s or STOP_TIMEOUT_S
    _wait(cache.backend, live, limit_s)
    print(f"run {run_id} stopped; `slime resume {run_id}{place_flags(options)}` goes on")
    return 0


def _wait(run: Backend, live: LiveRun, limit_s: float) -> None:
    def ended() -> bool | None:
        now = live_run(run, live.run_id)
        return True if now is None or now.epoch != live.epoch else None

    try:
        poll(f"the end of run {live.run_id}", limit_s, ended, interval_s=0.2)
    except DeadlineError as error:
        raise StopError(
            f"run {live.run_id} has not ended after {limit_s:.0f} s; its process is "
            f"{live.owner.pid}, its logs may say why"
        ) from error
