"""Stage 4: which groups the iteration trains, in which optimizer step, with which rewards."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import numpy as np

from slime_core.algorithms.advantages.groups import Groups
from slime_core.algorithms.advantages.registry import group_rewards
from slime_core.algorithms.reward_shaping import cosine_scaled, overlong_penalty
from slime_core.batching.converted import Converted
from slime_core.batching.select import (
    GroupVerdict,
    choose_groups,
    optimizer_steps,
    rollout_denominators,
)
from slime_core.batching.types import segment_sums
from slime_core.config.tree import RunConfig
from slime_core.plugins.args_view import ArgsView
from slime_core.refs import Ref
from slime_core.run import faults
from slime_core.run.context import RunContext
from slime_core.sample import Status
from slime_core.stages.batch_hooks import processed_rewards, removed_rows
from slime_core.stages.batch_metrics import batch_metrics, measured_metrics
from slime_core.stages.convert import convert, converter_digest, row_changes, trained_tokens
from slime_core.stages.rows import (
    graded,
    greedy_rewards,
    kept_rows,
    raw_rewards,
    reward_errors,
    reward_values,
)
from slime_core.store.batch import Batch, BatchContent, BatchGroup, put_batch, read_batch
from slime_core.store.columnar import SampleBatch
from slime_core.store.parts import DROPPED, KEPT, SPARE

log = logging.getLogger(__name__)
FILTERED = "dynamic_filter/"


async def pack(ctx: RunContext, scored: Ref) -> Ref:
    """Returns the iteration's batch; independent of the number of ranks."""
    k = scored.iteration
    faults.hold("pack", k)
    with ctx.clock.time(k, "pack"):
        batch = await asyncio.to_thread(_pack, ctx, k)
    return batch.ref()


def _pack(ctx: RunContext, k: int) -> Batch:
    found = read_batch(ctx.backend, k)
    if found is not None:
        return Batch(found.content, found.digest, found=True)
    content, measured = decide(ctx, k)
    by = ctx.by(k) | ({"measured": measured} if measured else {}) | converter_digest(ctx.config)
    return put_batch(ctx.backend, ctx.lease, content, by)


def decide(ctx: RunContext, k: int) -> tuple[BatchContent, dict[str, float]]:
    """The content of batch k, from the sealed segment k, and what was measured of its rows."""
    config = ctx.config
    seal, rows = kept_rows(ctx, k)
    finished = seal.as_segment().finished
    verdicts = [
        GroupVerdict(
            g,
            stored.entry.verdict == KEPT,
            stored.entry.reason or "",
            stored.entry.verdict == SPARE,
        )
        for g, stored in finished.items()
    ]
    selection = choose_groups(verdicts, _size(config.rollout.rollout_batch_size, rows, k))
    chosen = [rows[group_id] for group_id in selection.chosen]
    raw = np.concatenate([raw_rewards(ctx, batch) for batch in chosen])
    sizes = [len(batch) for batch in chosen]
    rollouts = rollout_ids(chosen, selection.chosen)
    removed = _removed(ctx, chosen)
    made = convert(ctx.config, chosen, raw, rollouts, removed)
    left_out = () if made is None else made.left_out
    removed = tuple(sorted({*removed, *left_out}))
    trained = trained_tokens(mask_sums(chosen), removed, made)
    groups = Groups(raw, np.repeat(np.asarray(selection.chosen), sizes), rollouts, trained)
    raw, rewards = _rewards(ctx, groups, chosen, made)
    content = BatchContent(
        iteration=k,
        groups=tuple(
            BatchGroup(g, finished[g].entry.attempt, k, size, finished[g].entry.digest)
            for g, size in zip(selection.chosen, sizes, strict=True)
        ),
        seals={k: seal.digest},
        rewards=rewards.tolist(),
        raw_rewards=raw.tolist(),
        rollout_ids=rollouts.tolist(),
        denominators=rollout_denominators(trained, rollouts).tolist(),
        steps=optimizer_steps(rollouts, len(set(rollouts)) // config.num_steps, config.num_steps),
        unused=tuple(
            (g, finished[g].entry.attempt, k, reason) for g, reason in selection.unused.items()
        ),
        tokens=int(sum(batch.numbers("response_length").sum() for batch in chosen)),
        metrics=seal.metrics
        | rollout_metrics(chosen, groups, seal.counts)
        | batch_metrics(chosen, groups, trained)
        | {"rollout/rewards": float(np.delete(rewards, left_out).mean())}
        | shaping_metrics(ctx, groups.rewards, chosen)
        | _removed_metrics(removed, made),
        removed=removed,
        converted=row_changes(made),
    )
    return content, measured_metrics(chosen)


def _removed(ctx: RunContext, chosen: list[SampleBatch]) -> tuple[int, ...]:
    path = ctx.config.rollout.rollout_sample_filter_path
    if path is None:
        return ()
    return removed_rows(path, ArgsView(ctx.config), [batch.to_samples() for batch in chosen])


def _removed_metrics(removed: tuple[int, ...], made: Converted | None) -> dict[str, float]:
    found = {"rollout/samples/removed": float(len(removed))} if removed else {}
    if made is not None:
        found["rollout/samples/left_out"] = float(len(made.left_out))
        found["rollout/samples/other_mask"] = float(len(made.masks))
    return found


def _rewards(
    ctx: RunContext, groups: Groups, chosen: list[SampleBatch], made: Converted | None
) -> tuple[np.ndarray, np.ndarray]:
    """Raw rewards and what advantages start from, both float64 [rows]."""
    if made is not None:
        return made.raw_rewards, made.rewards
    path = ctx.config.rewards.custom_reward_post_process_path
    if path is None:
        known = np.concatenate([graded(batch) for batch in chosen])
        return groups.rewards, normalised(ctx.config, groups, chosen, known)
    samples = [sample for batch in chosen for sample in batch.to_samples()]
    return processed_rewards(path, ArgsView(ctx.config), samples)


def _size(configured: int, rows: dict[int, SampleBatch], k: int) -> int:
    """Groups of the batch: a segment that was sealed for a smaller batch than is configured by now
    has no more to give, and the next segment has the new size."""
    if 0 < len(rows) < configured:
        log.warning("iteration %d trains %d groups: it was generated before rollout_batch_size "
                    "became %d", k, len(rows), configured)  # fmt: skip
        return len(rows)
    return configured


def normalised(
    config: RunConfig, groups: Groups, chosen: list[SampleBatch], known: np.ndarray
) -> np.ndarray:
    """float64 [rows]: rewards shaped by length, after the estimator's group transform.

    Args:
        known: bool [rows]. A row whose answer could not be graded, and is left out of the loss for
            it, gets 0 and does not enter the statistics of its group.
    """
    algorithm = config.algorithm
    rewards = np.zeros(len(known))
    assert groups.rollout_ids is not None and groups.response_lengths is not None
    rewards[known] = group_rewards(
        algorithm.advantage_estimator,
        Groups(
            shaped(config, groups.rewards, chosen)[known],
            groups.group_ids[known],
            groups.rollout_ids[known],
            groups.response_lengths[known],
            greedy_rewards(chosen)[known] if algorithm.advantage_estimator == "remax" else None,
        ),
        rewards_normalization=not algorithm.disable_rewards_normalization,
        std_normalization=not algorithm.disable_grpo_std_normalization,
    )
    return rewards


def shaped(config: RunConfig, raw: np.ndarray, chosen: list[SampleBatch]) -> np.ndarray:
    """float64 [rows]: rewards with what reward_shaping makes of the response lengths."""
    rewards, limit = config.rewards, config.rollout.rollout_max_response_len
    if rewards.reward_shaping == "none":
        return raw
    lengths = np.concatenate([batch.numbers("response_length") for batch in chosen]).tolist()
    if rewards.reward_shaping == "cosine":
        both = zip(raw, lengths, strict=True)
        return np.array([cosine_scaled(value > 0, length, limit) for value, length in both])
    buffer, factor = rewards.overlong_buffer_len, rewards.overlong_penalty_factor
    assert buffer is not None
    return raw + [overlong_penalty(length, limit, buffer, factor) for length in lengths]


def shaping_metrics(
    ctx: RunContext, raw: np.ndarray, chosen: list[SampleBatch]
) -> dict[str, float]:
    """What shaping added to the mean reward; nothing without shaping."""
    if ctx.config.rewards.reward_shaping == "none":
        return {}
    return {"rollout/reward_shaping": float((shaped(ctx.config, raw, chosen) - raw).mean())}


def rollout_ids(chosen: list[SampleBatch], group_ids: tuple[int, ...]) -> np.ndarray:
    """int64 [rows]: rows of one rollout share an id, rows of different ones never do."""
    ids: list[int] = []
    for batch, group_id in zip(chosen, group_ids, strict=True):
        places = batch.numbers("sample_position")
        ids += [group_id * 2**20 + int(place) for place in places]
    return np.asarray(ids, dtype=np.int64)


def mask_sums(chosen: list[SampleBatch]) -> np.ndarray:
    """float64 [rows]: trained tokens of each row; a removed sample has none."""
    sums = []
    for batch in chosen:
        mask = batch.loss_mask
        trained = segment_sums(mask.values, mask.offsets).astype(np.float64)
        trained = np.where(mask.valid, trained, batch.numbers("response_length"))
        sums.append(np.where(batch.numbers("remove_sample"), 0.0, trained))
    return np.concatenate(sums)


def rollout_metrics(
    chosen: list[SampleBatch], groups: Groups, counts: dict[str, int]
) -> dict[str, float]:
    """Metrics of the generated batch, by the names of docs/metrics."""
    lengths = np.concatenate([batch.numbers("response_length") for batch in chosen])
    status = [value for batch in chosen for value in batch.texts("status")]
    known = np.concatenate([graded(batch) for batch in chosen])
    found = {
        "rollout/raw_reward": float(groups.rewards[known].mean()),
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/max": float(lengths.max()),
        "rollout/response_len/min": float(lengths.min()),
        "rollout/response_len/median": float(np.median(lengths)),
        "rollout/response_tokens": float(lengths.sum()),
        "rollout/truncated_ratio": status.count(Status.TRUNCATED.value) / len(status),
        "rollout/zero_std_groups": float(groups.constant.sum()),
    }
    return found | _group_counts(counts) | _reward_metrics(chosen)


def _group_counts(counts: dict[str, int]) -> dict[str, float]:
    """Groups that were not simply kept, by verdict and reason."""
    found = {}
    for verdict, count in counts.items():
        kind, _, reason = verdict.partition(":")
        filtered = reason.removeprefix(FILTERED)
        if filtered != reason:
            name = "drop" if kind == DROPPED else kind
            found[f"rollout/dynamic_filter/{name}_{filtered}"] = float(count)
        elif kind != KEPT:
            found[f"rollout/groups/{verdict.replace(':', '_').replace('/', '_')}"] = float(count)
    return found


def _reward_metrics(chosen: list[SampleBatch]) -> dict[str, float]:
    """Means of the entries of dict rewards, and samples that could not be graded."""
    errors = Counter(reason for batch in chosen for reason in reward_errors(batch))
    found = {f"rollout/reward_error/{reason}": float(n) for reason, n in errors.items()}
    entries: dict[str, list[float]] = {}
    for batch in chosen:
        if batch.valid("reward_values").any():
            for row, known in zip(reward_values(batch), graded(batch), strict=True):
                for key, value in row.items() if known else ():
                    entries.setdefault(key, []).append(value)
    return found | {f"rollout/reward/{k}": float(np.mean(v)) for k, v in entries.items()}
