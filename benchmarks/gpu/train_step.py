"""One optimizer step of Qwen3-0.6B's shape by the trainer alone: speed, memory, kernels."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.host import keep, parser, show
from benchmarks.gpu.loop import clear
from benchmarks.gpu.qwen3_06b import LAYERS, VOCAB, write_model
from slime_core.batching.types import TrainBatch
from slime_core.megatron.rank import TrainerRank
from slime_core.megatron.settings import TrainerSettings

STEPS = 3
KERNELS = 14


def batch_of(rows: int, prompt_tokens: int, new_tokens: int, seed: int) -> TrainBatch:
    """Random tokens in sequences of one length; half of the rows are rewarded."""
    draw = np.random.default_rng(seed)
    length = prompt_tokens + new_tokens
    signs = np.where(np.arange(rows) % 2, 1.0, -1.0)
    return TrainBatch(
        tokens=draw.integers(4, VOCAB, rows * length).astype(np.int32),
        token_offsets=np.arange(rows + 1) * length,
        response_lengths=np.full(rows, new_tokens),
        loss_mask=np.ones(rows * new_tokens, np.uint8),
        rollout_log_probs=np.full(rows * new_tokens, -12.0, np.float32),
        response_offsets=np.arange(rows + 1) * new_tokens,
        rewards=signs,
        raw_rewards=signs,
        group_ids=np.arange(rows) // 2,
        rollout_ids=np.arange(rows),
        denominators=np.full(rows, float(new_tokens)),
        steps=(tuple(range(rows)),),
        truncated=np.zeros(rows, np.uint8),
    )


def kernels_of(profile: Any) -> list[tuple[str, float, int]]:
    """(name, seconds on the device, calls) of the kernels that took longest."""
    found = [
        (event.key, event.self_device_time_total / 1e6, event.count)
        for event in profile.key_averages()
        if event.self_device_time_total and str(event.device_type).endswith("CUDA")
    ]
    return sorted(found, key=lambda row: -row[1])[:KERNELS]


def measure(options: Any, folder: Path) -> dict[str, Any]:
    """Trains a few iterations, the last one under torch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    write_model(folder, "cuda", options.layers)
    settings = TrainerSettings(
        hf_checkpoint=str(folder),
        device="cuda",
        dtype="bfloat16",
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=options.max_tokens,
        logits_chunk_tokens=options.logits_chunk,
        train_iters=STEPS + 1,
    )
    rank = TrainerRank(settings)
    rank.setup()
    rank.set_state("0")
    seconds = []

    def train(k: int) -> None:
        batch = batch_of(options.rows, options.prompt_tokens, options.new_tokens, k)
        done = rank.train(0, str(k), str(k + 1), str(k), batch, k)
        seconds.append(done["seconds"]["steps"])

    for k in range(STEPS):
        train(k)
    peak_mib = torch.cuda.max_memory_allocated() / 2**20
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        train(STEPS)
        torch.cuda.synchronize()
    tokens = options.rows * (options.prompt_tokens + options.new_tokens)
    step_s = statistics.median(seconds[1:STEPS])
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "peak_mib": peak_mib,
        "kernels": kernels_of(seen),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rows", type=int, default=512)
    made.add_argument("--prompt-tokens", type=int, default=128)
    made.add_argument("--new-tokens", type=int, default=256)
    made.add_argument("--max-tokens", type=int, default=16384)
    made.add_argument("--logits-chunk", type=int, default=4096)
    made.add_argument("--layers", type=int, default=LAYERS)
    options = made.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="slime-gpu-"))
    try:
        result = measure(options, folder)
    finally:
        clear(folder)
    keep(options.out, "train-step", result)
    rows: list[tuple[str, Any]] = [
        ("optimizer step", f"{result['step_s']:.3f} s, {result['tokens_per_s']:.0f} tokens/s"),
        ("peak memory", f"{result['peak_mib']:.0f} MiB"),
    ]
    rows += [(f"{n} x {name[:90]}", f"{s:.3f} s") for name, s, n in result["kernels"]]
    show(rows)


if __name__ == "__main__":
    main()
