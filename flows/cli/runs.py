"""`slime runs`: the runs of a workspace or store, a line each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flows.cli.stored import open_root, parser, root_url, show
from slime_core.config.flags import parse
from slime_core.run.overview import RunOverview, overview
from slime_core.run.pause import paused_runs


def main(arguments: list[str]) -> int:
    """Prints the runs, the oldest first."""
    options = parse(parser("runs", __doc__, run=False), arguments)
    paused = {pause.run_id: pause for pause in paused_runs(Path(options.workspace).absolute())}
    runs = [
        replace(run, state="paused", note=paused[run.run_id].cause) if run.run_id in paused else run
        for run in overview(open_root(options), root_url(options))
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
