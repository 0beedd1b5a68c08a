"""The quickstart on a GPU: trainer and engine share it, the model learns to sort four digits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.host import keep, parser, show
from benchmarks.gpu.loop import clear, extremes, medians, run_loop
from slime_core.config.loading import load_config
from slime_core.engines.launcher import H200_OPTIONS

CONFIG = Path(__file__).parents[2] / "configs/quickstart.yaml"
WARM_UP = 3
# Log-probs of the canary, natural log. bf16 rounds weights and activations; SGLang's fp32
# attention multiplies in tf32.
TOLERANCES = {"float32": 0.05, "bfloat16": 0.5}
SGLANG = {
    **H200_OPTIONS,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 65536,
    "max_running_requests": 256,
    "cuda_graph_max_bs_decode": 128,
}


def overrides(options: Any, workspace: str) -> dict[str, Any]:
    """What differs from configs/quickstart.yaml."""
    return {
        "num_rollout": options.iterations,
        "workspace": workspace,
        "device": options.device,
        "rollout_engine": options.engine,
        "update_weight_transport": options.transport,
        "canary_tolerance": TOLERANCES[options.dtype],
        "engine_restarts": 0,
        "start_timeout_s": 400.0,
        "megatron": {"bf16": options.dtype == "bfloat16"},
        "sglang": SGLANG if options.engine == "sglang" else {},
    }


def rows_of(result: dict[str, Any]) -> list[tuple[str, Any]]:
    """The printed table."""
    seconds = medians(result, "seconds", WARM_UP)
    rows: list[tuple[str, Any]] = [
        ("engine, device", f"{result['engine']}, {result['device']}"),
        ("start to ready", f"{result['ready_s']:.1f} s"),
        ("iterations", len(result["iterations"])),
        ("median seconds by stage", ", ".join(f"{k} {v:.3f}" for k, v in seconds.items())),
    ]
    for metric, shown in (
        ("sync/canary_abs_diff", "canary difference, median / largest"),
        ("train/train_rollout_logprob_abs_diff", "mean log-prob difference, median / largest"),
        ("train/train_rollout_logprob_abs_diff_max", "largest log-prob difference, likewise"),
    ):
        middle, most = extremes(result, metric)
        rows.append((shown, f"{middle:.2e} / {most:.2e}"))
    for version, found in result["evaluations"].items():
        scores = [f"{name} {found[f'eval/{name}/reward']:.3f}" for name in ("greedy", "sampled")]
        rows.append((f"evaluation after {version}", ", ".join(scores)))
    return rows


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    made.add_argument("--transport", choices=("tensor", "disk"), default="tensor")
    made.add_argument("--iterations", type=int, default=60)
    options = made.parse_args()
    workspace = Path(tempfile.mkdtemp(prefix="slime-gpu-"))
    try:
        result = run_loop(load_config(CONFIG, overrides(options, str(workspace))))
    finally:
        clear(workspace)
    keep(options.out, f"quickstart-{options.engine}-{options.dtype}-{options.transport}", result)
    if result["iterations"]:
        show(rows_of(result))
    return 1 if result["error"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
