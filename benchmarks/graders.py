"""What grading costs: `python -m benchmarks.graders`.

CPU seconds count, of this process and of the grader process, so that other programs on the machine
do not enter: gradings a second and core of 15 kB responses, what the pool of killable processes
adds to them, and what a cheap grader costs through it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

import psutil

from slime_core.rewards.hub import RewardHub, RewardSettings
from slime_core.rewards.registry import grader_named
from slime_core.rewards.workers import GraderPool, PoolSettings
from slime_core.sample import Sample

RESPONSE_BYTES = 15_000
STEP = "Then we multiply both sides by \\frac{3}{4} and get x = 12, so 2x + 7 = 31. "
ANSWERS = [
    ("42", "42"), ("\\frac{3}{4}", "0.75"), ("x = 12", "12"), ("1,234", "1234"), ("17", "18"),
    ("\\sqrt{2}", "\\sqrt{3}"), ("(1, 2)", "(1,2)"), ("50\\%", "50"), ("2\\pi", "2\\pi"),
    ("\\text{no}", "yes"),
]  # fmt: skip
MATH = ("math", "deepscaler", "dapo", "math_verify", "gsm8k")
CHEAP = ("exact_match", "f1")


def responses(count: int, size: int) -> list[Sample]:
    """Long solutions that end with an answer, right ones and wrong ones."""
    found = []
    for i in range(count):
        answer, label = ANSWERS[i % len(ANSWERS)]
        steps = f"Solution {i}. " + STEP * (size // len(STEP))
        end = f"</think> Answer: {answer}\n#### {answer}\nIt is \\boxed{{{answer}}}."
        found.append(Sample(index=i, response=steps + end, label=label))
    return found


def alone(name: str, samples: list[Sample]) -> float:
    """CPU seconds of each grading without any pool."""
    grade: Callable[..., object] = grader_named(name).function()
    for sample in samples[: len(ANSWERS)]:
        grade(sample.response, sample.label, {})
    begun = time.process_time()
    for sample in samples:
        grade(sample.response, sample.label, {})
    return (time.process_time() - begun) / len(samples)


async def pooled(name: str, samples: list[Sample]) -> float:
    """CPU seconds of each grading in both processes, as a run has it."""
    pool = GraderPool(PoolSettings(workers=1))
    key = "score" if name == "dapo" else None
    hub = RewardHub(RewardSettings(rm_type=name, reward_key=key), None, pool)
    try:
        await hub.score_group(samples[: len(ANSWERS)])
        begun = _family_cpu_s()
        results = await hub.score_group(samples)
        used = _family_cpu_s() - begun
    finally:
        await hub.close()
        await pool.close()
    failed = [result for result in results if not hasattr(result, "value")]
    assert not failed, failed[0]
    return used / len(samples)


def _family_cpu_s() -> float:
    me = psutil.Process()
    times = [process.cpu_times() for process in [me, *me.children(recursive=True)]]
    return sum(used.user + used.system for used in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    for name in (*MATH, *CHEAP):
        size = RESPONSE_BYTES if name in MATH else 40
        samples = responses(options.count, size)
        bare = statistics.median(alone(name, samples) for _ in range(options.repeat))
        both = statistics.median(asyncio.run(pooled(name, samples)) for _ in range(options.repeat))
        print(
            f"{name:<12} {size:>6} bytes  alone {1e6 * bare:7.0f} us ({1 / bare:8.0f} /s/core)  "
            f"as in a run {1e6 * both:7.0f} us ({1 / both:8.0f} /s/core, +"
            f"{100 * (both / bare - 1):.0f} %, +{1e6 * (both - bare):.0f} us)"
        )


if __name__ == "__main__":
    main()
