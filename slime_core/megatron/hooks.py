"""Calls of the user's own functions in training, with what slime's functions expect to get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from slime_core.algorithms.advantages.assemble import AdvantageInputs
from slime_core.algorithms.objective import Objective, ObjectiveInputs
from slime_core.batching.types import TrainBatch
from slime_core.errors import PluginError
from slime_core.megatron.passes import MicroBatch
from slime_core.plugins.trainer_hooks import TrainerHook, TrainerHooks

# Our columns under slime's names.
TOKEN_COLUMNS = {
    "old": "log_probs",
    "rollout": "rollout_log_probs",
    "ref": "ref_log_probs",
    "teacher": "teacher_log_probs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
}
Rows = list[torch.Tensor]


def row_facts(batch: TrainBatch, rows: Sequence[int], mask: torch.Tensor) -> dict[str, Any]:
    """What is known of each row without a model.

    Args:
        batch: the batch of the iteration.
        rows: k of its rows.
        mask: bool [P], trained ones of all response tokens of these rows, one row after another.
    """
    ids = np.asarray(rows, dtype=np.int64)
    lengths = batch.response_lengths[ids].tolist()
    metadata = batch.metadata or (None,) * batch.num_rows
    device = mask.device
    tokens = [torch.from_numpy(batch.row_tokens(row).astype(np.int64)) for row in rows]
    return {
        "tokens": [row.to(device) for row in tokens],
        "total_lengths": batch.lengths[ids].tolist(),
        "response_lengths": lengths,
        "loss_masks": list(mask.int().split(lengths)),
        "rewards": batch.rewards[ids].tolist(),
        "raw_reward": batch.raw_rewards[ids].tolist(),
        "truncated": batch.truncated[ids].tolist(),
        "group_indices": batch.group_ids[ids].tolist(),
        "rollout_ids": batch.rollout_ids[ids].tolist(),
        "metadata": [metadata[row] for row in rows],
    }


def token_facts(
    columns: Mapping[str, torch.Tensor], lengths: Sequence[int]
) -> dict[str, list[torch.Tensor]]:
    """Token columns by slime's names, one tensor a row."""
    return {
        name: list(columns[ours].split(list(lengths)))
        for ours, name in TOKEN_COLUMNS.items()
        if ours in columns
    }


def custom_advantages(
    hooks: TrainerHooks, batch: TrainBatch, columns: Mapping[str, torch.Tensor]
) -> Callable[[AdvantageInputs], tuple[torch.Tensor, torch.Tensor | None]] | None:
    """`--custom-advantage-function-path` over the whole batch, None without it."""
    hook = hooks.advantage
    if hook is None:
        return None

    def advantages(x: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        data = row_facts(batch, range(batch.num_rows), x.mask)
        data |= token_facts(columns, data["response_lengths"])
        hook(hooks.args, data)
        found = _as_column(hook, data, "advantages", x.mask)
        returns = _as_column(hook, data, "returns", x.mask) if "returns" in data else None
        if x.values is not None and returns is None:
            raise PluginError(f"{hook.name} set no returns, which the critic learns")
        return found, returns

    return advantages


def _as_column(hook: TrainerHook, data: dict[str, Any], name: str, mask: torch.Tensor) -> Any:
    """A list of row tensors that a function has set, as one column."""
    return torch.cat([row.to(mask.device) for row in row_tensors(hook, data, name)]).double()


def row_tensors(hook: TrainerHook, data: Mapping[str, Any], name: str) -> Rows:
    """What a function has set: a tensor with a value of each response token for each row.

    Raises:
        PluginError: it is something else.
    """
    lengths = data["response_lengths"]
    rows = data.get(name)
    if not isinstance(rows, (list, tuple)) or len(rows) != len(lengths):
        raise PluginError(
            f"{hook.name} must set rollout_data[{name!r}] to a list of {len(lengths)} tensors, "
            "one for each row"
        )
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if not isinstance(row, torch.Tensor) or row.shape != (length,):
            shape = tuple(row.shape) if isinstance(row, torch.Tensor) else type(row).__name__
            raise PluginError(
                f"{hook.name}: {name} of row {place} must be a tensor of its {length} response "
                f"tokens, not {shape}"
            )
    return [row.detach() for row in rows]


def with_hooks(
    objective: Objective, hooks: TrainerHooks, batch: TrainBatch, micro: MicroBatch
) -> Objective:
    """The objective with the user's correction and reduction of this micro-batch.

    A micro-batch of padding alone is not shown to them.
    """
    if (hooks.tis is None and hooks.reducer is None) or not micro.row_ids:
        return objective
    rows = row_facts(batch, micro.row_ids, micro.mask)
    changes: dict[str, Any] = {}
    if hooks.tis is not None:
        changes["custom_correction"] = _correction(hooks, hooks.tis, rows)
    if hooks.reducer is not None:
        changes["reducer"] = _reducer(hooks.reducer, rows, objective.reduction == "token_mean")
    return replace(objective, **changes)


def _correction(hooks: TrainerHooks, hook: TrainerHook, rows: dict[str, Any]) -> Any:
    lengths = rows["response_lengths"]

    def correct(
        values: torch.Tensor, x: ObjectiveInputs
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        assert x.rollout_log_probs is not None
        train = x.old_log_probs if x.train_log_probs is None else x.train_log_probs
        found = hook(
            args=hooks.args,
            pg_loss=values,
            train_log_probs=list(train.split(lengths)),
            rollout_log_probs=list(x.rollout_log_probs.split(lengths)),
            loss_masks=rows["loss_masks"],
            total_lengths=rows["total_lengths"],
            response_lengths=lengths,
            **({"metadata": rows["metadata"]} if hook.takes_metadata else {}),
        )
        if not isinstance(found, tuple) or len(found) != 3:
            raise PluginError(f"{hook.name} must return (pg_loss, loss masks, metrics)")
        loss, masks, metrics = found
        kept = torch.cat([row.reshape(-1) for row in masks]) if masks else x.mask
        for name, value in {"pg_loss": loss, "loss masks": kept, **metrics}.items():
            if not isinstance(value, torch.Tensor) or value.shape != x.mask.shape:
                raise PluginError(
                    f"{hook.name}: {name} must be a tensor of all {len(x.mask)} response tokens"
                )
        return loss, kept.bool() & x.mask, {n: value.detach() for n, value in metrics.items()}

    return correct


def _reducer(hook: TrainerHook, rows: dict[str, Any], per_token: bool) -> Any:
    def reduce(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        lengths = rows["response_lengths"]
        metadata = {"metadata": rows["metadata"]} if hook.takes_metadata else {}
        masks = list(mask.to(values.dtype).split(lengths))
        function = hook(rows["total_lengths"], lengths, masks, per_token, **metadata)
        if not callable(function):
            raise PluginError(f"{hook.name} must return a function from token losses to a number")
        total = function(torch.where(mask, values, torch.zeros_like(values)))
        return as_number(hook, total)

    return reduce


def as_number(hook: TrainerHook, value: Any) -> torch.Tensor:
    """A tensor with one number.

    Raises:
        PluginError: it is something else.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shown = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise PluginError(f"{hook.name} must give a tensor with one number, not {shown}")
    return value.reshape(())


def custom_loss(
    hooks: TrainerHooks,
    batch: TrainBatch,
    micro: MicroBatch,
    logits: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
    weights: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`--custom-loss-function-path` on one micro-batch.

    Args:
        logits: [P, V] that predict all response tokens of its rows, with gradient.
        columns: [P] each; besides those of TOKEN_COLUMNS the current log-probs and entropy.
        weights: [P] of each token in the step's loss.

    Returns:
        The micro-batch's part of the loss, and of each metric.
    """
    hook = hooks.loss
    assert hook is not None
    data = row_facts(batch, micro.row_ids, micro.mask)
    lengths = data["response_lengths"]
    data |= token_facts(columns, lengths)
    for name in ("current_log_probs", "entropy"):
        data[name] = list(columns[name].split(lengths))

    def sum_of_sample_mean(values: torch.Tensor) -> torch.Tensor:
        if values.shape != micro.mask.shape:
            raise PluginError(
                f"{hook.name}: sum_of_sample_mean takes a value for each of the "
                f"{len(micro.mask)} response tokens, not {tuple(values.shape)}"
            )
        kept = torch.where(micro.mask, values, torch.zeros_like(values))
        return (kept * weights.to(values.dtype)).sum()

    extra = {"metadata": data["metadata"]} if hook.takes_metadata else {}
    found = hook(hooks.args, data, logits, sum_of_sample_mean, **extra)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
        raise PluginError(f"{hook.name} must return (loss, metrics)")
    loss, metrics = found
    numbers = {name: torch.as_tensor(value).detach() for name, value in metrics.items()}
    return as_number(hook, loss), {n: as_number(hook, value) for n, value in numbers.items()}
