"""Trainer ranks on several GPUs beside one: the quickstart's numbers, and a step's seconds.

Needs two GPUs. The quickstart runs whole (trainer ranks over NCCL, the embedded engine on the first
GPU); a step of Qwen3-0.6B's shape is the trainer alone.
"""

from __future__ import annotations

import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.gpu.host import keep, parser, show
from benchmarks.gpu.loop import clear, run_loop
from benchmarks.gpu.qwen3_06b import write_model
from benchmarks.gpu.train_step import batch_of
from slime_core.config.loading import load_config
from slime_core.engines.launcher import free_port
from slime_core.megatron.rank import TrainerRank
from slime_core.megatron.settings import TrainerSettings

CONFIG = Path(__file__).parents[2] / "configs/quickstart.yaml"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one GPU": (1, {}),
    "DP2": (2, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP2 with sequence parallel": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
}
STEPS = 4
DEADLINE_S = 240.0
SHOWN = ("train/loss", "train/grad_norm", "rollout/raw_reward", "sync/canary_abs_diff")


def quickstart(ranks: int, layout: dict[str, Any], iterations: int) -> dict[str, Any]:
    """The loop's iterations at one layout, in fp32."""
    workspace = Path(tempfile.mkdtemp(prefix="slime-gpu-"))
    overrides = {
        "num_rollout": iterations,
        "workspace": str(workspace),
        "device": "cuda",
        "rollout_engine": "embedded",
        "actor_num_gpus_per_node": ranks,
        "start_timeout_s": 200.0,
        "megatron": {"bf16": False, **layout},
    }
    try:
        return run_loop(load_config(CONFIG, overrides))
    finally:
        clear(workspace)


def step_of_rank(
    rank: int, ranks: int, layout: dict[str, Any], port: int, model: str, options: Any, answers: Any
) -> None:
    """One rank's process: a few optimizer steps, then (rank, seconds, gradient norms, peak)."""
    import torch

    trainer = TrainerRank(
        TrainerSettings(
            hf_checkpoint=model,
            device="cuda",
            dtype="bfloat16",
            rank=rank,
            local_rank=rank,
            world_size=ranks,
            master_port=port,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=options.max_tokens,
            logits_chunk_tokens=4096,
            train_iters=STEPS,
            **layout,
        )
    )
    trainer.setup()
    trainer.set_state("0")
    seconds, norms = [], []
    for k in range(STEPS):
        batch = batch_of(options.rows, options.prompt_tokens, options.new_tokens, k)
        done = trainer.train(0, str(k), str(k + 1), str(k), batch, k)
        seconds.append(done["seconds"]["steps"])
        norms.append(done["steps"][0]["grad_norm"])
    answers.put((rank, seconds, norms, torch.cuda.max_memory_allocated() / 2**20))


def step(ranks: int, layout: dict[str, Any], model: str, options: Any) -> dict[str, Any]:
    """Median seconds of an optimizer step at one layout, without the first."""
    context = get_context("spawn")
    answers = context.Queue()
    port = free_port() if ranks > 1 else 0
    given = [(rank, ranks, layout, port, model, options, answers) for rank in range(ranks)]
    processes = [context.Process(target=step_of_rank, args=args) for args in given]
    for process in processes:
        process.start()
    try:
        found = sorted(answers.get(timeout=DEADLINE_S) for _ in processes)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    tokens = options.rows * (options.prompt_tokens + options.new_tokens)
    step_s = statistics.median(found[0][1][1:])
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "grad_norms": found[0][2],
        "peak_mib": max(row[3] for row in found),
    }


def rows_of(name: str, loop: dict[str, Any], alone: dict[str, Any]) -> list[tuple[str, Any]]:
    """The printed rows of one layout."""
    rows: list[tuple[str, Any]] = []
    if loop["iterations"]:
        last = loop["iterations"][-1]
        seconds = [row["seconds"]["train"] for row in loop["iterations"][3:]]
        metrics = ", ".join(f"{key} {last['metrics'].get(key):.6g}" for key in SHOWN)
        rows.append((f"{name}: quickstart's last iteration", metrics))
        rows.append((f"{name}: quickstart, train", f"{statistics.median(seconds):.3f} s"))
    rows.append(
        (
            f"{name}: step of Qwen3-0.6B's shape",
            f"{alone['step_s']:.3f} s, {alone['tokens_per_s']:.0f} tokens/s, "
            f"peak {alone['peak_mib']:.0f} MiB, gradient norms {alone['grad_norms']}",
        )
    )
    return rows


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    made.add_argument("--iterations", type=int, default=10)
    made.add_argument("--rows", type=int, default=512)
    made.add_argument("--prompt-tokens", type=int, default=128)
    made.add_argument("--new-tokens", type=int, default=256)
    made.add_argument("--max-tokens", type=int, default=16384)
    options = made.parse_args()
    model = Path(tempfile.mkdtemp(prefix="slime-gpu-"))
    rows: list[tuple[str, Any]] = []
    failed = False
    try:
        write_model(model, "cpu")
        for name in options.only:
            ranks, layout = LAYOUTS[name]
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                loop = fresh.submit(quickstart, ranks, layout, options.iterations).result()
            alone = step(ranks, layout, str(model), options)
            keep(options.out, f"layout-{name}".replace(" ", "-"), {**loop, "step": alone})
            rows += rows_of(name, loop, alone)
            failed |= loop["error"] is not None
    finally:
        clear(model)
    show(rows)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
