"""Further numbers of the generated batch. Those of `batch_metrics` are sealed in it, so only what
the rows say enters; what was measured while they were made stands beside the digest."""

from __future__ import annotations

from collections import Counter

import numpy as np

from slime_core.algorithms.advantages.groups import Groups
from slime_core.evaluation.passk import pass_curve
from slime_core.evaluation.repetition import has_repetition
from slime_core.stages.rows import graded, turn_counts
from slime_core.store.columnar import SampleBatch

PASS = 1.0
QUARTILES = (25, 50, 75, 100)


def batch_metrics(
    chosen: list[SampleBatch], groups: Groups, trained: np.ndarray
) -> dict[str, float]:
    """Lengths, spread of rewards, repetition, turns, passes and groups without signal.

    Args:
        chosen: rows of each group.
        groups: their raw rewards.
        trained: [rows] trained tokens.
    """
    known = np.concatenate([graded(batch) for batch in chosen])
    lengths = np.concatenate([batch.tokens.lengths for batch in chosen])
    texts = [text or "" for batch in chosen for text in batch.texts("response")]
    responses = np.concatenate([batch.numbers("response_length") for batch in chosen])
    turns = [count for batch in chosen for count in turn_counts(batch)]
    found = {
        "rollout/raw_reward/std": float(groups.rewards[known].std()),
        "rollout/total_lengths/mean": float(lengths.mean()),
        "rollout/total_lengths/max": float(lengths.max()),
        "rollout/trained_tokens": float(trained.sum()),
        "rollout/repetition_frac": sum(map(has_repetition, texts)) / len(texts),
    }
    found |= _correct_lengths(responses[known & (groups.rewards == PASS)])
    found |= _turns(turns, responses, trained)
    return found | _passes(groups, known) | _without_signal(groups)


def measured_metrics(chosen: list[SampleBatch]) -> dict[str, float]:
    """Speculative decoding, prefix cache and time outside the engine; what was not used or not
    reported by the engine has no number.

    Args:
        chosen: rows of each group.
    """

    def column(name: str) -> np.ndarray:
        return np.concatenate([batch.numbers(name) for batch in chosen])

    def total(name: str) -> float:
        return float(column(name).sum())

    found: dict[str, float] = {}
    for name, part, whole in (
        ("rollout/spec_accept_rate", "spec_accept_token_num", "spec_draft_token_num"),
        ("rollout/spec_accept_length", "completion_token_num", "spec_verify_ct"),
        ("rollout/prefix_cache_hit_rate", "cached_tokens", "total_prompt_tokens"),
    ):
        if count := total(whole):
            found[name] = total(part) / count
    if "rollout/prefix_cache_hit_rate" in found:
        found["rollout/avg_cached_tokens_per_sample"] = float(column("cached_tokens").mean())
    if (seconds := column("non_generation_time")).any():
        found["perf/non_generation_time/mean"] = float(seconds.mean())
        found["perf/non_generation_time/max"] = float(seconds.max())
    return found


def _correct_lengths(lengths: np.ndarray) -> dict[str, float]:
    """Quartiles of the response lengths of correct answers; nothing where there is none."""
    if not lengths.size:
        return {}
    return {
        f"rollout/correct_length/p{percent}": float(np.percentile(lengths, percent))
        for percent in QUARTILES
    }


def _passes(groups: Groups, known: np.ndarray) -> dict[str, float]:
    """pass@k of the batch: mean over groups, from the rollouts that could be graded."""
    assert groups.rollout_ids is not None
    graded_only = Groups(groups.rewards[known], groups.group_ids[known], groups.rollout_ids[known])
    passed = graded_only.rollout_rewards == PASS
    by_group = passed[np.argsort(graded_only.rollout_place, kind="stable")]
    tries = np.split(by_group, np.cumsum(graded_only.sizes)[:-1]) if passed.size else []
    curve = pass_curve([group.tolist() for group in tries])
    return {f"passrate/pass@{k}": value for k, value in curve.items()}


def _turns(turns: list[int | None], responses: np.ndarray, trained: np.ndarray) -> dict[str, float]:
    """Turns and lengths of the rows that say how many turns they had; nothing without any.

    Args:
        turns: [rows]
        responses: [rows] response tokens, what tools answered included.
        trained: [rows] those of them that the policy wrote.
    """
    said = np.array([count is not None for count in turns], dtype=bool)
    if not said.any():
        return {}
    counts = np.array([count for count in turns if count is not None])
    measured = {
        "multi_turn/multi_turn_metric/round_number_": counts,
        "multi_turn/raw_response_length/": responses[said],
        "multi_turn/wo_obs_response_length/": trained[said],
    }
    found = {"rollout/round_number": float(counts.mean())}
    for name, values in measured.items():
        found |= {
            f"{name}mean": float(values.mean()),
            f"{name}median": float(np.median(values)),
            f"{name}max": float(values.max()),
            f"{name}min": float(values.min()),
        }
    return found


def _without_signal(groups: Groups) -> dict[str, float]:
    """Groups of equal rewards, counted by that reward."""
    equal = groups.constant & (groups.sizes > 1)
    values = Counter(round(float(mean), 1) for mean in groups.means[equal])
    return {f"rollout/zero_std/count_{value}": float(n) for value, n in sorted(values.items())}
