"""The two ceilings of a GPU: a large matrix product and a large copy; and pinned host copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.gpu.host import keep, parser, show

GEMM_SIZE = 8192
COPY_BYTES = 4 * 2**30
HOST_BYTES = 2**30
REPEATS = 20


def median_ms(run: Callable[[], object], repeats: int = REPEATS, warm_up: int = 3) -> float:
    """Median milliseconds of a call, by CUDA events."""
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def gemm_tflops() -> float:
    """bf16, 8192 x 8192 x 8192, random data."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda").bfloat16() for _ in range(2))
    return 2 * GEMM_SIZE**3 / median_ms(lambda: a @ b) / 1e9


def copy_tbps() -> float:
    """Device to device, bytes read plus bytes written."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_ms(lambda: target.copy_(source)) / 1e9


def host_gbps() -> float:
    """Pinned host memory to the device."""
    source = torch.empty(HOST_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty(HOST_BYTES, dtype=torch.uint8, device="cuda")
    return HOST_BYTES / median_ms(lambda: target.copy_(source, non_blocking=True)) / 1e6


def main() -> None:
    options = parser(__doc__).parse_args()
    result = {"gemm_tflops": gemm_tflops(), "copy_tbps": copy_tbps(), "host_gbps": host_gbps()}
    keep(options.out, "ceilings", result)
    show(
        [
            ("bf16 GEMM 8192^3", f"{result['gemm_tflops']:.0f} TFLOP/s"),
            ("device copy, read + written", f"{result['copy_tbps']:.2f} TB/s"),
            ("pinned host to device", f"{result['host_gbps']:.1f} GB/s"),
        ]
    )


if __name__ == "__main__":
    main()
