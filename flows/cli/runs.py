"""`slime runs`: the runs of a workspace or store, a line each."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from flows.cli.stored import AWAY_PATIENCE_S, open_root, parser, root_url, show
from slime_core.config.flags import parse
from slime_core.errors import AwayError
from slime_core.run.overview import RunOverview, overview
from slime_core.run.pause import Pause, paused_runs


def main(arguments: list[str]) -> int:
    """Prints the runs, the oldest first; returns 3 where the store is away, so that only runs which
    wait for it are known."""
    options = parse(parser("runs", __doc__, run=False), arguments)
    paused = {pause.run_id: pause for pause in paused_runs(Path(options.workspace).absolute())}
    try:
        root = open_root(options, patience_s=AWAY_PATIENCE_S)
        found = overview(root, root_url(options), AWAY_PATIENCE_S)
    except AwayError as error:
        return _tell_paused(list(paused.values()), error, as_json=options.json)
    runs = [
        replace(run, state="paused", note=paused[run.run_id].cause) if run.run_id in paused else run
        for run in found
    ]
    if options.json:
        show([run.to_dict() for run in runs], as_json=True)
    elif not runs:
        print(f"no runs in {root_url(options)}")
    else:
        lines = [_line(run) for run in runs]
        if any(run.note for run in runs):
            lines = [
                {**line, "note": run.note or None} for line, run in zip(lines, runs, strict=True)
            ]
        show(lines, as_json=False)
    return 0


def _tell_paused(paused: list[Pause], error: AwayError, *, as_json: bool) -> int:
    """Prints what runs that wait for the store have noted on this machine."""
    print(f"the store does not say which runs it holds: {error}", file=sys.stderr)
    if as_json:
        show([{"run_id": p.run_id, "state": "paused", "note": p.cause} for p in paused], True)
    for pause in () if as_json else paused:
        print(f"{pause.run_id} is {pause.describe()}")
    return 3


def _line(run: RunOverview) -> dict[str, object]:
    return {
        "run": run.run_id,
        "state": run.state,
        "done": f"{run.iterations} of {'?' if run.planned is None else run.planned}",
        "reward": None if run.reward is None else f"{run.reward:.3f}",
        "last change": f"{_age(run.age_s)} ago",
    }


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
