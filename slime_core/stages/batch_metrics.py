"""Further numbers of the generated batch. They are sealed in it, so only what the rows say enters,
nothing that was measured while they were made."""

from __future__ import annotations

from collections import Counter

import numpy as np

from slime_core.algorithms.advantages.groups import Groups
from slime_core.evaluation.repetition import has_repetition
from slime_core.stages.rows import graded
from slime_core.store.columnar import SampleBatch


def batch_metrics(
    chosen: list[SampleBatch], groups: Groups, trained: np.ndarray
) -> dict[str, float]:
    """Lengths, spread of rewards, repetition and groups without signal.

    Args:
        chosen: rows of each group.
        groups: their raw rewards.
        trained: [rows] trained tokens.
    """
    known = np.concatenate([graded(batch) for batch in chosen])
    lengths = np.concatenate([batch.tokens.lengths for batch in chosen])
    texts = [text or "" for batch in chosen for text in batch.texts("response")]
    return {
        "rollout/raw_reward/std": float(groups.rewards[known].std()),
        "rollout/total_lengths/mean": float(lengths.mean()),
        "rollout/total_lengths/max": float(lengths.max()),
        "rollout/trained_tokens": float(trained.sum()),
        "rollout/repetition_frac": sum(map(has_repetition, texts)) / len(texts),
    } | _without_signal(groups)


def _without_signal(groups: Groups) -> dict[str, float]:
    """Groups of equal rewards, counted by that reward."""
    equal = groups.constant & (groups.sizes > 1)
    values = Counter(round(float(mean), 1) for mean in groups.means[equal])
    return {f"rollout/zero_std/count_{value}": float(n) for value, n in sorted(values.items())}
