"""Every algorithm on the quickstart: `python -m benchmarks.algorithms [ROW ...] [--seeds 1 2 3]`.

Each row is `slime train configs/quickstart.yaml --no-prefect` with some flags, once for each seed,
in a workspace of its own. It reads the held-out accuracies and appends one JSON line a run to
`--out`; runs that stand there are not repeated. `--table` prints what stands there as a table,
`--picture FILE` draws the curves.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "configs/quickstart.yaml"
ITERATIONS = 60


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        flags: besides those of the quickstart.
        greedy, sampled: accuracies that are wanted at least, None where no figure was given.
        stale: iterations by which samples are older than the weights they train.
        teacher: first trains a teacher by plain grpo, then begins anew with it.
    """

    flags: str
    greedy: float | None = None
    sampled: float | None = None
    stale: int = 0
    teacher: bool = False


_WHITE = "--normalize-advantages"
_STALE = "--advantage-estimator grpo"
ROWS: dict[str, Row] = {
    "grpo": Row("", 0.93, 0.84),
    "gspo": Row("--advantage-estimator gspo --eps-clip 0.01 --num-steps-per-rollout 2", 0.90, 0.80),
    "reinforce_plus_plus": Row(f"--advantage-estimator reinforce_plus_plus {_WHITE}", 0.90, 0.80),
    "rloo": Row("--advantage-estimator rloo", 0.90, 0.80),
    "cispo": Row("--advantage-estimator cispo --num-steps-per-rollout 2", 0.90, 0.80),
    "ppo": Row(f"--advantage-estimator ppo --critic-lr 1e-3 {_WHITE}", 0.93, 0.88),
    "stale": Row(_STALE, stale=4),
    "stale-tis": Row(f"{_STALE} --use-tis", 0.90, 0.78, stale=4),
    "stale-icepop": Row(f"{_STALE} --use-tis --tis-mode mask --tis-clip-low 0.5", stale=4),
    "stale-rollout-logprobs": Row(f"{_STALE} --use-rollout-logprobs", stale=4),
    "dr_grpo": Row("--advantage-estimator dr_grpo"),
    "sapo": Row("--advantage-estimator sapo --num-steps-per-rollout 2"),
    "gmpo": Row("--advantage-estimator gmpo --eps-clip 0.4 --num-steps-per-rollout 2"),
    "ipo": Row("--advantage-estimator ipo --num-steps-per-rollout 2"),
    "opo": Row("--advantage-estimator opo"),
    "gpg": Row("--advantage-estimator gpg"),
    "remax": Row("--advantage-estimator remax"),
    "max_rl": Row("--advantage-estimator max_rl"),
    "pass_at_k": Row("--advantage-estimator pass_at_k"),
    "reinforce_plus_plus_baseline": Row(
        f"--advantage-estimator reinforce_plus_plus_baseline {_WHITE}"
    ),
    "opd": Row("--use-opd --opd-kl-coef 0.1", teacher=True),
    "grpo-kl": Row("--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl"),
}


def run(name: str, seed: int) -> dict[str, Any]:
    """Trains once. Returns the accuracies after each evaluated iteration."""
    row = ROWS[name]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        flags = shlex.split(row.flags)
        if row.teacher:
            _train(Path(folder) / "teacher", seed, [], 0)
            (weights,) = Path(folder).glob(f"teacher/local/*/weights/*-{ITERATIONS}")
            flags += ["--opd-teacher-load", str(weights)]
        lines = _train(Path(folder) / "run", seed, flags, row.stale)
    records = [json.loads(line) for line in lines.splitlines()]
    return {
        "row": name,
        "seed": seed,
        "flags": row.flags,
        "stale": row.stale,
        "seconds": round(time.monotonic() - start, 1),
        "greedy": curve(records, "eval/greedy"),
        "sampled": curve(records, "eval/sampled"),
    }


def _train(workspace: Path, seed: int, flags: list[str], stale: int) -> str:
    """Trains the quickstart in a workspace of its own; returns its metrics.jsonl."""
    program = ["benchmarks.stale"] if stale else ["flows.cli.main", "train"]
    command = [sys.executable, "-m", *program, CONFIG, "--seed", str(seed), "--no-use-mlflow"]
    command += ["--num-rollout", str(ITERATIONS), *flags, "--workspace", str(workspace)]
    command += ["--stale", str(stale)] if stale else ["--no-prefect", "--new"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}")
    return "".join(path.read_text() for path in workspace.glob("local/*/metrics.jsonl"))


def curve(records: Sequence[dict[str, Any]], metric: str) -> dict[int, float]:
    """Iterations in the weights -> accuracy."""
    points = {r["step"]: r["metrics"][metric] for r in records if metric in r["metrics"]}
    return dict(sorted(points.items()))


def read(out: Path) -> list[dict[str, Any]]:
    """The runs that were measured; steps are integers again."""
    if not out.exists():
        return []
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    for one in runs:
        for metric in ("greedy", "sampled"):
            one[metric] = {int(step): value for step, value in one[metric].items()}
    return runs


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Means over seeds at the last iteration, beside the figures that were wanted."""
    lines = [
        "| run | flags | greedy | sampled | wanted | seeds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in ROWS.items():
        own = [one for one in runs if one["row"] == name]
        if not own:
            continue
        cells = []
        for metric in ("greedy", "sampled"):
            last = [one[metric][max(one[metric])] for one in own]
            cells.append(f"{statistics.fmean(last):.3f} ({min(last):.3f}-{max(last):.3f})")
        wanted = "" if row.greedy is None else f"{row.greedy:.2f} / {row.sampled:.2f}"
        flags = f"`{row.flags}`" if row.flags else ""
        stale = f" (samples {row.stale} iterations old)" if row.stale else ""
        lines.append(f"| {name}{stale} | {flags} | {' | '.join(cells)} | {wanted} | {len(own)} |")
    return "\n".join(lines)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Mean sampled accuracy by iteration, rows on fresh samples left and stale ones right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, stale in zip(axes, (False, True), strict=True):
        shown = [name for name, row in ROWS.items() if (row.stale > 0) == stale]
        for place, name in enumerate(shown):
            own = [one["sampled"] for one in runs if one["row"] == name]
            if own:
                steps = sorted(own[0])
                means = [statistics.fmean(curve[step] for curve in own) for step in steps]
                style = "-" if place < 10 else "--"  # there are ten colours
                axis.plot(steps, means, style, label=name)
        axis.set_title("samples 4 iterations old" if stale else "fresh samples")
        axis.set_xlabel("iteration")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("held-out accuracy at temperature 1")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms.jsonl"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"unknown rows {', '.join(unknown)}; known: {', '.join(ROWS)}")
    if not (options.table or options.picture):
        options.out.parent.mkdir(parents=True, exist_ok=True)
        done = {(one["row"], one["seed"]) for one in read(options.out)}
        for name in options.rows or ROWS:
            for seed in options.seeds:
                if (name, seed) in done:
                    continue
                found = run(name, seed)
                with options.out.open("a") as stream:
                    stream.write(json.dumps(found) + "\n")
                last = (found[m][max(found[m])] for m in ("greedy", "sampled"))
                print(name, seed, *(f"{value:.3f}" for value in last), flush=True)
    if options.table:
        print(table(read(options.out)))
    if options.picture:
        draw(read(options.out), options.picture)


if __name__ == "__main__":
    main()
