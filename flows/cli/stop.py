"""`slime stop RUN`: ends a running training cleanly, wherever it was started."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path

from flows.cli.stored import (
    AWAY_PATIENCE_S,
    open_root,
    open_run,
    parser,
    place_flags,
    root_url,
)
from flows.services.runs import LiveRun, live_run
from slime_core.config.flags import parse
from slime_core.errors import AwayError, DeadlineError, SlimeError
from slime_core.run.overview import state_of
from slime_core.run.paths import RunPaths
from slime_core.run.pause import paused_runs
from slime_core.run.process import ProcessIdentity
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
    try:
        run_id, cache = open_run(options, patience_s=AWAY_PATIENCE_S)
        live = live_run(cache.backend, run_id)
    except AwayError as error:
        return _stop_paused(options, error)
    if live is None:
        state = state_of(open_root(options), root_url(options), run_id)
        print(f"run {run_id} does not run: it {ENDS.get(state, f'is {state}')}")
        return 0
    _refuse_elsewhere(run_id, live.owner)
    if options.after_iteration:
        ask(RunPaths(Path(options.workspace).absolute(), run_id).local, live.epoch)
        limit_s = options.timeout_s or ITERATION_TIMEOUT_S
    else:
        os.kill(live.owner.pid, signal.SIGTERM)
        limit_s = options.timeout_s or STOP_TIMEOUT_S
    _wait(run_id, live.owner, limit_s, lambda: _has_ended(cache.backend, live))
    print(f"run {run_id} stopped; `slime resume {run_id}{place_flags(options)}` goes on")
    return 0


def _stop_paused(options: argparse.Namespace, error: AwayError) -> int:
    """Stops a run that waits for the store, which its note on this machine tells of."""
    paused = paused_runs(Path(options.workspace).absolute())
    wanted = options.run
    fitting = [p for p in paused if p.run_id == wanted] or [
        p for p in paused if wanted == "last" or p.run_id.startswith(wanted)
    ]
    if len(fitting) != 1:
        known = ", ".join(p.run_id for p in paused) or "none"
        raise StopError(
            f"the store does not say which run {wanted} is, and of the runs that are known to wait "
            f"for it ({known}) {'none fits' if not fitting else 'several fit'}: {error}"
        ) from error
    [pause] = fitting
    _refuse_elsewhere(pause.run_id, pause.owner)
    if options.after_iteration:
        raise StopError(
            f"{pause.run_id} is {pause.describe()}: its iteration cannot be finished now, so leave "
            "--after-iteration out"
        )
    os.kill(pause.owner.pid, signal.SIGTERM)
    limit_s = options.timeout_s or STOP_TIMEOUT_S
    _wait(pause.run_id, pause.owner, limit_s, lambda: pause.owner.is_gone() is True)
    print(
        f"run {pause.run_id} stopped; `slime resume {pause.run_id}{place_flags(options)}` goes on "
        "once the store can be used"
    )
    return 0


def _refuse_elsewhere(run_id: str, owner: ProcessIdentity) -> None:
    if owner.is_gone() is not False:
        raise StopError(
            f"run {run_id} belongs to {owner.describe()}: type `slime stop` on that machine"
        )


def _has_ended(run: Backend, live: LiveRun) -> bool:
    if live.owner.is_gone():
        return True
    try:
        now = live_run(run, live.run_id)
    except AwayError:
        return False
    return now is None or now.epoch != live.epoch


def _wait(run_id: str, owner: ProcessIdentity, limit_s: float, ended: Callable[[], bool]) -> None:
    try:
        poll(f"the end of run {run_id}", limit_s, lambda: ended() or None, interval_s=0.2)
    except DeadlineError as error:
        raise StopError(
            f"run {run_id} has not ended after {limit_s:.0f} s; its process is "
            f"{owner.pid}, its logs may say why"
        ) from error
