"""What a process of the pool does: one case, from an empty workspace to its line in the results."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.kill_matrix.cases import Case
from benchmarks.kill_matrix.places import missing_for
from benchmarks.kill_matrix.play import NO_KILL, Played, play
from benchmarks.kill_matrix.report import Line, line_of

TRIES = 3


def play_case(case: Case, out: Path, untouched: Path) -> Line:
    """Plays one case, again where the run had finished before any kill met it."""
    workspace = (out / case.name).absolute()
    if missing := missing_for(case.store):
        line: Line = {"case": case.name, "store": case.store, "problems": [], "kills": []}
        return line | {"verdict": f"skipped: no {', no '.join(missing)}", "seconds": 0.0}
    played = Played()
    for _ in range(TRIES):
        shutil.rmtree(workspace, ignore_errors=True)
        played = play(case, workspace, untouched)
        if played.problems != [NO_KILL]:
            break
    if not played.problems:
        shutil.rmtree(workspace)
    return line_of(case, played, workspace)
