"""Trials of the trainer's functions: on four answers of three rollouts, with logits and gradients
as in a training step. One answer is partly masked (a tool spoke), one altogether."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from slime_core.algorithms.advantages.assemble import AdvantageInputs
from slime_core.algorithms.losses.reductions import token_weights
from slime_core.algorithms.objective import ObjectiveInputs, evaluate
from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.batching.types import TrainBatch
from slime_core.errors import PluginError
from slime_core.megatron.hooks import custom_advantages, custom_loss, with_hooks
from slime_core.megatron.objective import objective_of
from slime_core.megatron.passes import MicroBatch
from slime_core.megatron.postprocess import Postprocessed, changed_by
from slime_core.plugins.trainer_hooks import (
    ADVANTAGE,
    LOSS,
    POSTPROCESS,
    ROLES,
    TrainerHooks,
    load_trainer_hook,
)  # fmt: skip

VOCAB = 32
TRIAL_S = 60.0
PROMPT, RESPONSES = 3, (5, 1, 6, 2)
ROLLOUTS = (0, 1, 2, 2)
MASKS = ([1] * 5, [1], [1, 1, 0, 0, 1, 1], [0, 0])
REWARDS = (1.0, -1.0, 0.5, 0.5)


def trainer_trial(name: str, args: Any, path: str) -> list[str]:
    """Calls a function of the trainer's as a step would.

    Raises:
        PluginError: what is wrong with it, in one sentence.
    """
    hook = load_trainer_hook(name, path)
    hooks = TrainerHooks(args, **{ROLES[name]: hook})
    batch = example_batch()
    if name == ADVANTAGE:
        return _advantages(hooks, batch, path)
    if name == POSTPROCESS:
        return _postprocessed(hooks, batch)
    logits = torch.randn(sum(RESPONSES), VOCAB, generator=_seeded(0)).requires_grad_()
    log_p = logits.log_softmax(-1)
    micro = example_micro_batch(batch, log_p)
    log_probs = log_p.gather(1, micro.targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    step = (hooks, batch, micro, log_probs, entropy)
    loss, metrics = _custom_loss(logits, *step) if name == LOSS else _objective(*step)
    return [*_gradients(path, loss, logits, micro.mask), f"metrics: {_shown(metrics)}"]


def example_batch() -> TrainBatch:
    """Four answers: one by itself, one of one token, and two rows of one rollout."""
    lengths = np.array(RESPONSES, dtype=np.int64)
    trained = [sum(sum(m) for m, r in zip(MASKS, ROLLOUTS, strict=True) if r == mine)
               for mine in ROLLOUTS]  # fmt: skip
    random = np.random.default_rng(0)
    total = int(lengths.sum())
    return TrainBatch(
        tokens=random.integers(0, VOCAB, total + PROMPT * len(lengths), dtype=np.int32),
        token_offsets=np.concatenate([[0], (lengths + PROMPT).cumsum()]),
        response_lengths=lengths,
        loss_mask=np.array([one for mask in MASKS for one in mask], dtype=np.uint8),
        rollout_log_probs=random.uniform(-4, -2, total).astype(np.float32),
        response_offsets=np.concatenate([[0], lengths.cumsum()]),
        rewards=np.array(REWARDS),
        raw_rewards=np.array([1.0, 0.0, 1.0, 1.0]),
        group_ids=np.zeros(len(lengths), dtype=np.int64),
        rollout_ids=np.array(ROLLOUTS, dtype=np.int64),
        denominators=np.array(trained, dtype=np.float64),
        steps=(tuple(range(len(lengths))),),
        truncated=np.array([0, 0, 0, 1], dtype=np.uint8),
        metadata=tuple({} for _ in lengths),
    )


def example_micro_batch(batch: TrainBatch, log_p: torch.Tensor) -> MicroBatch:
    """All four rows at once, with the columns that a step has."""
    rows = torch.repeat_interleave(torch.arange(batch.num_rows), torch.tensor(RESPONSES))
    response = [batch.row_tokens(row)[PROMPT:] for row in range(batch.num_rows)]
    targets = torch.from_numpy(np.concatenate(response).astype(np.int64))
    current = log_p.detach().gather(1, targets[:, None])[:, 0]
    nothing = torch.empty(0, dtype=torch.int64)
    noise = torch.randn(len(targets), generator=_seeded(1)) * 0.05
    columns = {
        "old": current + noise,
        "rollout": torch.where(torch.from_numpy(batch.loss_mask).bool(), current - noise, 0.0),
        "advantages": torch.tensor(REWARDS)[rows],
    }
    return MicroBatch(
        tokens=nothing, positions=nothing, params=cast(Any, None), index=nothing,
        targets=targets, rows=rows, row_ids=tuple(range(batch.num_rows)),
        mask=torch.from_numpy(batch.loss_mask).bool(),
        denominators=torch.from_numpy(batch.denominators), columns=columns,
    )  # fmt: skip


def _custom_loss(logits: torch.Tensor, hooks: TrainerHooks, batch: TrainBatch, micro: MicroBatch,
                 log_probs: torch.Tensor, entropy: torch.Tensor) -> Any:  # fmt: skip
    weights = token_weights(
        "sample_mean", micro.rows, micro.denominators, rollouts=3, tokens=int(micro.mask.sum())
    )
    columns = {**micro.columns, "current_log_probs": log_probs, "entropy": entropy}
    return custom_loss(hooks, batch, micro, logits, columns, weights)


def _objective(hooks: TrainerHooks, batch: TrainBatch, micro: MicroBatch,
               log_probs: torch.Tensor, entropy: torch.Tensor) -> Any:  # fmt: skip
    result = evaluate(
        with_hooks(objective_of(AlgorithmSettings()), hooks, batch, micro),
        ObjectiveInputs(
            log_probs=log_probs, entropy=entropy, old_log_probs=micro.columns["old"],
            advantages=micro.columns["advantages"], mask=micro.mask, rows=micro.rows,
            denominators=micro.denominators, rollouts=3, tokens=int(micro.mask.sum()),
            trained_rollouts=3, rollout_log_probs=micro.columns["rollout"],
        ),
    )  # fmt: skip
    return result.loss, result.metrics


def _advantages(hooks: TrainerHooks, batch: TrainBatch, path: str) -> list[str]:
    mask = torch.from_numpy(batch.loss_mask).bool()
    log_probs = torch.from_numpy(batch.rollout_log_probs)
    columns = {"old": log_probs, "rollout": log_probs, "ref": log_probs - 0.1}
    call = custom_advantages(hooks, batch, columns)
    assert call is not None
    found, _ = call(
        AdvantageInputs(torch.tensor(REWARDS), torch.tensor(RESPONSES), mask, log_probs)
    )
    if not torch.isfinite(found[mask]).all():
        raise PluginError(f"{path} gave advantages that are not finite: {found[mask].tolist()}")
    each = [[round(x, 4) for x in row.tolist()] for row in found.split(list(RESPONSES))]
    lines = [f"the advantages of {len(RESPONSES)} answers, worth {list(REWARDS)}, are {each}"]
    if not found[mask].any():
        lines.append("note: all are 0, so nothing would be learned")
    return lines


def _postprocessed(hooks: TrainerHooks, batch: TrainBatch) -> list[str]:
    """Under settings that read every column."""
    log_probs = torch.from_numpy(batch.rollout_log_probs)
    rows = torch.repeat_interleave(torch.arange(batch.num_rows), torch.tensor(RESPONSES))
    columns = {"old": log_probs + 0.05, "rollout": log_probs, "ref": log_probs - 0.1}
    columns["advantages"] = torch.tensor(REWARDS)[rows]
    settings = AlgorithmSettings(use_tis=True, use_kl_loss=True)
    data = Postprocessed(batch, columns)
    assert hooks.postprocess is not None
    found = changed_by(hooks.postprocess, hooks.args, settings, data, 0, 0, TRIAL_S)
    counts = {name: int(where.sum()) for name, where in found.changed.items()}
    masked, left = counts.pop("loss_masks"), int(found.batch.loss_mask.sum())
    lines = [f"{masked} of {int(batch.loss_mask.sum())} trained tokens were masked"]
    lines += [f"{name} were changed at {count} tokens" for name, count in counts.items()]
    if not left:
        lines.append("note: no token is left, so nothing would be learned")
    if not masked and not counts:
        lines.append("note: it changed nothing")
    return lines


def _gradients(
    path: str, loss: torch.Tensor, logits: torch.Tensor, mask: torch.Tensor
) -> list[str]:
    """What the loss says and which tokens it trains. Raises PluginError where it trains none."""
    if not torch.isfinite(loss):
        raise PluginError(f"{path} gave the loss {loss.item()}")
    if not loss.requires_grad:
        raise PluginError(f"{path} gave a loss without gradient: do not detach it")
    loss.backward()
    assert logits.grad is not None
    if not torch.isfinite(logits.grad).all():
        raise PluginError(f"{path} gave a gradient that is not finite")
    reached = logits.grad.abs().sum(-1) > 0
    lines = [f"loss {loss.item():.4f}; {int((reached & mask).sum())} of {int(mask.sum())} trained "
             "tokens have a gradient"]  # fmt: skip
    if not reached.any():
        lines.append("note: no token has a gradient, so nothing would be learned")
    if outside := int((reached & ~mask).sum()):
        lines.append(f"note: {outside} tokens outside of the loss mask have a gradient too")
    return lines


def _shown(metrics: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {float(value):.4f}" for name, value in metrics.items()) or "none"


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
