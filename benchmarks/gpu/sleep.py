"""Sleep and wake of a trainer of Qwen3-0.6B's shape: what a GPU gets back, and how fast."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.host import keep, parser, show, used_mib
from benchmarks.gpu.loop import clear
from benchmarks.gpu.qwen3_06b import write_model
from benchmarks.gpu.train_step import batch_of
from slime_core.megatron.rank import TrainerRank
from slime_core.megatron.settings import TrainerSettings

GIB = 2**30


def measure(options: Any, folder: Path) -> dict[str, Any]:
    """Trains a step, sleeps and wakes, trains another."""
    import torch

    write_model(folder, "cuda")
    settings = TrainerSettings(
        hf_checkpoint=str(folder),
        device="cuda",
        dtype="bfloat16",
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=options.max_tokens,
        logits_chunk_tokens=4096,
        train_iters=4,
    )
    rank = TrainerRank(settings)
    rank.setup()
    rank.set_state("0")
    batch = batch_of(options.rows, 128, 256, 0)
    rank.train(0, "0", "1", "0", batch, 0)
    trainer = rank._trainer
    assert trainer is not None
    digest = trainer.weights_digest()
    cycles = []
    kept_bytes = 0
    for _ in range(options.cycles):
        torch.cuda.synchronize()
        awake_mib, start = used_mib(), time.perf_counter()
        kept_bytes = rank.sleep()["kept_bytes"]
        slept, asleep_mib = time.perf_counter(), used_mib()
        allocated = torch.cuda.memory_allocated()
        woken = time.perf_counter()
        rank.wake()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        cycles.append(
            {
                "sleep_s": slept - start,
                "wake_s": ended - woken,
                "awake_mib": awake_mib,
                "asleep_mib": asleep_mib,
                "allocated_asleep_bytes": allocated,
            }
        )
    same = trainer.weights_digest() == digest
    rank.train(0, "1", "2", "1", batch_of(options.rows, 128, 256, 1), 1)
    rank.close()
    return {"kept_bytes": kept_bytes, "same_bits": same, "cycles": cycles}


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--cycles", type=int, default=20)
    made.add_argument("--rows", type=int, default=64)
    made.add_argument("--max-tokens", type=int, default=16384)
    options = made.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="slime-gpu-"))
    try:
        found = measure(options, folder)
    finally:
        clear(folder)
    keep(options.out, "sleep", found)
    cycles = found["cycles"]
    kept = found["kept_bytes"] / GIB

    def median(name: str) -> float:
        return statistics.median(cycle[name] for cycle in cycles)

    show(
        [
            ("weights, masters and moments brought to the host", f"{kept:.2f} GiB"),
            ("falls asleep, median", f"{median('sleep_s'):.2f} s"),
            ("wakes, median", f"{median('wake_s'):.2f} s"),
            (
                "GPU in use awake, first and last",
                f"{cycles[0]['awake_mib']}, {cycles[-1]['awake_mib']} MiB",
            ),
            (
                "GPU in use asleep, first and last",
                f"{cycles[0]['asleep_mib']}, {cycles[-1]['asleep_mib']} MiB",
            ),
            ("tensors on the GPU asleep", f"{cycles[-1]['allocated_asleep_bytes']} bytes"),
            ("weights afterwards", "the same bits" if found["same_bits"] else "OTHER BITS"),
        ]
    )
    return int(not found["same_bits"])


if __name__ == "__main__":
    raise SystemExit(main())
