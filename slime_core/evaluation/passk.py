"""Success within k tries, estimated from n tries."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(tries: int, passed: int, k: int) -> float:
    """Chance that k tries drawn without replacement hold a pass: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.

    Args:
        tries: n, at least k.
        passed: c, between 0 and n.
        k: at least 1.
    """
    if not 1 <= k <= tries or not 0 <= passed <= tries:
        raise ValueError(f"no pass@{k} of {passed} passes in {tries} tries")
    return 1.0 - math.comb(tries - passed, k) / math.comb(tries, k)


def pass_curve(groups: Sequence[Sequence[bool]]) -> dict[int, float]:
    """Mean pass@k over prompts for k = 1, 2, 4, ... and the number of tries.

    Prompts with fewer than k tries (failed samples) do not count towards pass@k.

    Args:
        groups: for each prompt, whether each of its tries passed.
    """
    most = max((len(group) for group in groups), default=0)
    ks = [2**power for power in range(most.bit_length()) if 2**power <= most]
    if most and ks[-1] != most:
        ks.append(most)
    curve = {}
    for k in ks:
        values = [pass_at_k(len(group), sum(group), k) for group in groups if len(group) >= k]
        curve[k] = math.fsum(values) / len(values)
    return curve


def average_at_k(groups: Sequence[Sequence[float]]) -> float:
    """Mean over prompts of the mean score of their tries: every prompt weighs the same."""
    means = [math.fsum(group) / len(group) for group in groups if group]
    if not means:
        raise ValueError("no scored tries")
    return math.fsum(means) / len(means)
