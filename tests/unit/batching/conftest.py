"""Batches of random content for the batching tests."""

from __future__ import annotations

import numpy as np
import pytest

from slime_core.batching.types import TrainBatch, offsets_of


def build_batch(
    prompt_lengths, response_lengths, *, rollout_ids=None, steps=None, mask=None, seed=0
) -> TrainBatch:
    rng = np.random.default_rng(seed)
    response_lengths = np.asarray(response_lengths, dtype=np.int64)
    lengths = np.asarray(prompt_lengths, dtype=np.int64) + response_lengths
    n, tokens, responses = len(lengths), int(lengths.sum()), int(response_lengths.sum())
    if mask is None:
        mask = rng.integers(0, 2, responses)
    mask = np.asarray(mask, dtype=np.uint8)
    rollout_ids = np.arange(n) if rollout_ids is None else np.asarray(rollout_ids)
    rows = np.repeat(np.arange(n), response_lengths)
    own = np.bincount(rows, weights=mask, minlength=n)
    denominators = np.array([own[rollout_ids == r].sum() for r in rollout_ids], dtype=np.float64)
    return TrainBatch(
        tokens=rng.integers(0, 1000, tokens).astype(np.int32),
        token_offsets=offsets_of(lengths),
        response_lengths=response_lengths,
        loss_mask=mask,
        rollout_log_probs=-rng.random(responses).astype(np.float32),
        response_offsets=offsets_of(response_lengths),
        rewards=rng.normal(size=n),
        raw_rewards=rng.integers(0, 2, n).astype(np.float64),
        group_ids=np.zeros(n, dtype=np.int64),
        rollout_ids=rollout_ids.astype(np.int64),
        denominators=denominators,
        steps=(tuple(range(n)),) if steps is None and n else (steps or ()),
        truncated=np.zeros(n, dtype=np.uint8),
    )


@pytest.fixture(name="make_batch")
def make_batch_fixture():
    return build_batch


@pytest.fixture(scope="module", name="make_batch_module")
def make_batch_module_fixture():
    """The same for hypothesis, which refuses function-scoped fixtures."""
    return build_batch
