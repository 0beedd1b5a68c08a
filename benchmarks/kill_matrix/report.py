"""What is kept of played cases, and the table of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.kill_matrix.cases import Case
from benchmarks.kill_matrix.play import Played

Line = dict[str, Any]


def line_of(case: Case, played: Played, workspace: Path) -> Line:
    """What is kept of a played case."""
    verdict = "failed" if played.problems else "passed"
    kept = {"workspace": str(workspace)} if played.problems else {}
    return {"case": case.name, "store": case.store, "verdict": verdict, **asdict(played), **kept}


def read_lines(path: Path) -> dict[str, Line]:
    """Case -> its last line in the results; nothing where there are none yet."""
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["case"]: line for line in lines}


def table(lines: list[Line]) -> str:
    """A row for each kill, and what is wrong."""
    rows = [f"{'case':<24} {'store':<5} {'verdict':<8} {'went on':<9} {'to train':>8}  kill"]
    for line in lines:
        if not line["kills"]:
            rows.append(f"{line['case']:<24} {line['store']:<5} {line['verdict']:<8}")
        for number, one in enumerate(line["kills"]):
            first = (line["case"], line["store"], line["verdict"]) if number == 0 else ("", "", "")
            seconds = "" if one["to_train_s"] is None else f"{one['to_train_s']:.1f} s"
            rows.append(
                f"{first[0]:<24} {first[1]:<5} {first[2]:<8} {one['went_on']:<9} {seconds:>8}  "
                f"{one['kill']}"
            )
        rows += [f"    {problem[:400]}" for problem in line["problems"]]
    return "\n".join([*rows, "", summary(lines)])


def summary(lines: list[Line]) -> str:
    """How many of which verdict, and how long the way back took."""
    verdicts = [line["verdict"] for line in lines]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in sorted(set(verdicts)))
    kills = [one for line in lines for one in line["kills"]]
    parts = [f"{len(lines)} cases: {counts}; {len(kills)} kills"]
    for how in ("resume", "in place"):
        seconds = sorted(
            one["to_train_s"]
            for one in kills
            if one["went_on"] == how and one["to_train_s"] is not None
        )
        if seconds:
            middle = seconds[len(seconds) // 2]
            parts.append(f"{how} to train step: median {middle:.1f} s, most {seconds[-1]:.1f} s")
    return "; ".join(parts)
