"""Optimizer states on the host (`--optimizer-cpu-offload`): GPU memory and seconds beside a trainer
that keeps them, for Qwen3-0.6B's shape.

A rehearsal without a GPU: --device cpu --model configs/quickstart/model --rows 4 --max-tokens 512
"""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.gpu.host import keep, parser, show
from benchmarks.gpu.loop import clear
from benchmarks.gpu.qwen3_06b import write_model
from benchmarks.gpu.train_step import batch_of
from slime_core.megatron.rank import TrainerRank
from slime_core.megatron.settings import TrainerSettings
from slime_core.weights.tables import read_shape

STEPS = 4
UPDATES = 3
DEADLINE_S = 400.0
MIB = 2**20
VARIANTS = {"states on the GPU": False, "states on the host": True}


def measure(model: str, on_host: bool, options: Any) -> dict[str, Any]:
    """Trains some steps, then updates alone with gradients of zero. In a process of its own."""
    import torch

    cuda = options.device == "cuda"
    rank = TrainerRank(
        TrainerSettings(
            hf_checkpoint=model,
            device=options.device,
            dtype=options.dtype,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=options.max_tokens,
            logits_chunk_tokens=4096,
            train_iters=STEPS,
            optimizer_cpu_offload=on_host,
        )
    )
    started = time.perf_counter()
    rank.setup()  # Megatron can be imported from here on
    from slime_core.megatron.host_adam import HostAdam
    from slime_core.megatron.optimizer import members, read_gradients, take_step, zero_gradients

    found: dict[str, Any] = {"start_s": time.perf_counter() - started, "steps": [], "seconds": []}
    rank.set_state("0")
    vocabulary = read_shape(model).vocab_size
    for k in range(STEPS):
        batch = batch_of(options.rows, 128, 256, k)
        batch = replace(batch, tokens=batch.tokens % vocabulary)
        done = rank.train(0, str(k), str(k + 1), str(k), batch, k)
        found["seconds"].append(done["seconds"]["steps"])
        found["steps"].append(
            {name: done["steps"][0][name] for name in ("loss", "grad_norm", "weights_digest")}
        )

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    if cuda:
        found["peak_mib"] = torch.cuda.max_memory_allocated() / MIB
        found["between_mib"] = torch.cuda.memory_allocated() / MIB
    assert rank._trainer is not None
    state = rank._trainer.state
    updates = []
    for _ in range(UPDATES):
        zero_gradients(state)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        wait()
        begun = time.perf_counter()
        _, norm = read_gradients(state)
        take_step(state, norm)
        wait()
        updates.append(time.perf_counter() - begun)
    if cuda:
        found["update_peak_mib"] = torch.cuda.max_memory_allocated() / MIB
    inner = [member.optimizer for member in members(state.optimizer)]
    found["update_s"] = statistics.median(updates)
    found["host_bytes"] = sum(adam.host_bytes for adam in inner if isinstance(adam, HostAdam))
    rank.close()
    return found


def rows_of(name: str, found: dict[str, Any]) -> list[tuple[str, Any]]:
    """The printed rows of one variant."""
    rows: list[tuple[str, Any]] = [
        (f"{name}: a step, median", f"{statistics.median(found['seconds'][1:]):.3f} s"),
        (f"{name}: of it the update", f"{found['update_s']:.3f} s"),
        (f"{name}: start of the trainer", f"{found['start_s']:.1f} s"),
        (f"{name}: host memory", f"{found['host_bytes'] / MIB:.0f} MiB"),
    ]
    if "peak_mib" in found:
        rows += [
            (f"{name}: GPU peak of steps", f"{found['peak_mib']:.0f} MiB"),
            (f"{name}: GPU peak of an update", f"{found['update_peak_mib']:.0f} MiB"),
            (f"{name}: GPU between steps", f"{found['between_mib']:.0f} MiB"),
        ]
    return rows


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    made.add_argument("--rows", type=int, default=64)
    made.add_argument("--max-tokens", type=int, default=16384)
    made.add_argument("--model", help="a folder in place of Qwen3-0.6B's shape")
    options = made.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="slime-gpu-"))
    found: dict[str, Any] = {}
    try:
        if options.model is None:
            write_model(folder, options.device)
        model = options.model or str(folder)
        for name, on_host in VARIANTS.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                found[name] = pool.submit(measure, model, on_host, options).result(DEADLINE_S)
    finally:
        clear(folder)
    keep(options.out, f"offload-{options.dtype}", found)
    rows = [row for name, one in found.items() for row in rows_of(name, one)]
    kept, away = (one["steps"] for one in found.values())
    norms = [abs(a["grad_norm"] / k["grad_norm"] - 1) for k, a in zip(kept, away, strict=True)]
    rows += [
        (f"weights after {STEPS} steps", "the same bits" if kept == away else "other bits"),
        ("largest difference of gradient norms", f"{max(norms):.1e}"),
    ]
    show(rows)
    return int(max(norms) > 1e-3)


if __name__ == "__main__":
    raise SystemExit(main())
