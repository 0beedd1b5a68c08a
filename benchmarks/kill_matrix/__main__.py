"""`python -m benchmarks.kill_matrix --help`."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from benchmarks.kill_matrix import __doc__ as ABOUT
from benchmarks.kill_matrix.cases import Case, boundary_cases, random_cases
from benchmarks.kill_matrix.one_case import play_case
from benchmarks.kill_matrix.play import play_untouched
from benchmarks.kill_matrix.report import Line, read_lines, table


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.kill_matrix",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--out", type=Path, default=Path("kill-matrix"), help="results, workspaces")
    made.add_argument("--jobs", type=int, default=1, help="cases at a time")
    made.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="boundary|random|CASE",
        help="a part of the matrix or cases by name (`sync-flow`); may be given again",
    )
    made.add_argument("--random-seed", type=int, default=1, help="of the random moments")
    made.add_argument("--store", choices=("alternating", "file", "s3"), default="alternating")
    made.add_argument("--again", action="store_true", help="play cases again that failed")
    made.add_argument("--list", action="store_true", help="show the cases and end")
    return made


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases that the options ask for, in their order."""
    parts = {"boundary": boundary_cases(), "random": random_cases(options.random_seed)}
    every = [case for part in parts.values() for case in part]
    names = {case.name for case in every}
    for wanted in options.only:
        if wanted not in parts and wanted not in names:
            raise SystemExit(f"there is no case {wanted}: --list shows them")
    wanted = {
        case.name for name in options.only for case in parts.get(name, []) or every
        if name in parts or case.name == name
    }  # fmt: skip
    cases = [case for case in every if not options.only or case.name in wanted]
    if options.store != "alternating":
        cases = [replace(case, store=options.store) for case in cases]
    return cases


class Matrix:
    """Plays cases and keeps a line of each in `results.jsonl`."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._results = out / "results.jsonl"
        self.lines = read_lines(self._results)
        out.mkdir(parents=True, exist_ok=True)

    def run(self, cases: list[Case], jobs: int, again: bool) -> None:
        """Plays what has no line yet."""
        done = ("passed", *(() if again else ("failed",)))
        left = [c for c in cases if self.lines.get(c.name, {}).get("verdict") not in done]
        if not left:
            return
        untouched = play_untouched((self._out / "untouched").absolute())
        # Processes, not threads: who watches several runs at once sees each of them too late.
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            played = [pool.submit(play_case, case, self._out, untouched) for case in left]
            for line in (done.result() for done in as_completed(played)):
                self._keep(line)
                name, seconds = line["case"], line["seconds"]
                print(f"{name:<24} {line['verdict']:<8} {seconds:6.1f} s", flush=True)

    def _keep(self, line: Line) -> None:
        with self._results.open("a") as results:
            results.write(json.dumps(line) + "\n")
        self.lines[line["case"]] = line


def main() -> int:
    """Exit status 1 where a case failed."""
    options = parser().parse_args()
    cases = chosen(options)
    if options.list:
        for case in cases:
            print(f"{case.name:<24} {case.store:<5} {'; '.join(map(str, case.kills))}")
        return 0
    matrix = Matrix(options.out)
    matrix.run(cases, options.jobs, options.again)
    lines = [matrix.lines[case.name] for case in cases]
    print(table(lines))
    return 1 if any(line["verdict"] == "failed" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
