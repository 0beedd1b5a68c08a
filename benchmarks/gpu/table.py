"""Prints every result in a folder as one Markdown table."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.gpu.host import parser, show
from benchmarks.gpu.loop import extremes, medians

CANARY = "sync/canary_abs_diff"
GAP = "train/train_rollout_logprob_abs_diff"


def attention_cell(found: dict[str, Any]) -> str:
    errors = max(found["errors"])
    return f"{found['forward_ms']:.2f} / {found['both_ms']:.2f} ms, error {errors:.1e}"


def rows_of(result: dict[str, Any]) -> list[tuple[str, Any]]:
    """Rows of one result file."""
    name = result["name"]
    if name == "ceilings":
        return [(key, f"{result[key]:.4g}") for key in ("gemm_tflops", "copy_tbps", "host_gbps")]
    if name == "attention":
        return [
            (f"attention {pack} {way}", attention_cell(found))
            for pack, ways in result["packs"].items()
            for way, found in ways.items()
        ]
    if name == "contracts":
        return [("contract tests against SGLang", result["summary"])]
    if name == "train-step":
        step = f"{result['step_s']:.3f} s, {result['tokens_per_s']:.0f} tokens/s"
        return [("trainer alone, Qwen3-0.6B shape: optimizer step", step)]
    rows: list[tuple[str, Any]] = []
    if result.get("error"):
        rows.append((f"{name} FAILED", result["error"].strip().splitlines()[0][:200]))
    if len(result["iterations"]) < 2:
        return rows
    seconds = ", ".join(f"{k} {v:.3f}" for k, v in medians(result, "seconds", 1).items())
    rows.append((f"{name}: {len(result['iterations'])} iterations, seconds", seconds))
    for metric in (CANARY, GAP, f"{GAP}_max"):
        middle, most = extremes(result, metric)
        rows.append((f"{name}: {metric}", f"{middle:.2e} / {most:.2e}"))
    for version, found in result["evaluations"].items():
        scores = {n.removeprefix("eval/"): v for n, v in found.items() if n.endswith("/reward")}
        rows.append((f"{name}: evaluation {version}", scores))
    return rows


def main() -> None:
    options = parser(__doc__).parse_args()
    results = [json.loads(path.read_text()) for path in sorted(options.out.glob("*.json"))]
    rows: list[tuple[str, Any]] = []
    if results:
        rows.append(("host", " ".join(f"{k} {v}" for k, v in results[0]["host"].items())))
    for result in results:
        rows += rows_of(result)
    show(rows)


if __name__ == "__main__":
    main()
