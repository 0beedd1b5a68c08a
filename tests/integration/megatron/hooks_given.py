"""Functions that a user might name in the trainer's settings, written for slime's parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def grpo_from_logits(
    args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped policy loss, from scratch."""
    logits = logits / args.rollout_temperature
    response = [
        row[total - length :]
        for row, total, length in zip(
            batch["tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
        )
    ]
    targets = torch.cat(response)
    log_p = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    ratio = (log_p - torch.cat(batch["log_probs"])).exp()
    advantages = torch.cat(batch["advantages"])
    bounded = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip)
    loss = sum_of_sample_mean(torch.maximum(-ratio * advantages, -bounded * advantages))
    same = (log_p - torch.cat(batch["current_log_probs"])).abs().max()
    assert same < 1e-5, f"log-probs differ by {same}"
    return loss, {"my_ratio": sum_of_sample_mean(ratio)}


def sometimes_silent(args: Any, batch: Any, logits: torch.Tensor, mean: Any) -> Any:
    """Reports a number for some micro-batches only."""
    del args
    return mean(logits.sum(-1) * 0), {} if len(batch["tokens"]) % 2 else {"odd": 1.0}


def weighted_by_metadata(args: Any, rollout_data: dict[str, Any]) -> None:
    """The row's reward times the weight that its train_metadata holds, halved by a setting."""
    rollout_data["advantages"] = [
        reward * facts["weight"] * args.factor * torch.ones(length)
        for reward, facts, length in zip(
            rollout_data["rewards"],
            rollout_data["metadata"],
            rollout_data["response_lengths"],
            strict=True,
        )
    ]
    assert rollout_data["log_probs"][0].shape == rollout_data["advantages"][0].shape
    rollout_data["returns"] = rollout_data["advantages"]


def too_short(args: Any, rollout_data: dict[str, Any]) -> None:
    del args
    rollout_data["advantages"] = [row[1:] for row in rollout_data["loss_masks"]]


def clipped_and_vetoed(args: Any, *, pg_loss: Any, train_log_probs: Any, rollout_log_probs: Any,
                       loss_masks: Any, **others: Any) -> Any:  # fmt: skip
    """Weights up to args.tis_clip; rows with a ratio below 0.5 go."""
    assert others["response_lengths"] == [len(mask) for mask in loss_masks]
    ratios = [
        torch.where(mask.bool(), (ours - theirs).exp(), 1.0)
        for ours, theirs, mask in zip(train_log_probs, rollout_log_probs, loss_masks, strict=True)
    ]
    kept = [
        mask * int(len(ratio) == 0 or ratio.min() >= 0.5)
        for ratio, mask in zip(ratios, loss_masks, strict=True)
    ]
    weights = torch.cat(ratios).clamp(0, args.tis_clip)
    return pg_loss * weights, kept, {"my_weight": weights}


def constant_length(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[torch.Tensor],
    calculate_per_token_loss: bool,
) -> Any:
    """Dr.GRPO as a reducer: every rollout's sum over a constant."""
    assert len(total_lengths) == len(response_lengths) and not calculate_per_token_loss

    def reduce(values: torch.Tensor) -> torch.Tensor:
        rows = values.split(response_lengths)
        return sum((x * m).sum() for x, m in zip(rows, loss_masks, strict=True)) / 20

    return reduce


def broken(args: Any, rollout_data: Any) -> None:
    del args
    raise KeyError("no such thing")


def _note(args: Any, *what: Any) -> None:
    with Path(args.notes).open("a", encoding="utf-8") as file:
        file.write(" ".join(map(str, what)) + "\n")


def at_the_start(args: Any) -> None:
    _note(args, "init of", torch.distributed.get_world_size())


def before_log_probs(args: Any, model: Any, store_prefix: str) -> None:
    _note(args, f"log-probs {store_prefix!r} of", [type(m).__name__ for m in model])


def before_a_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    """The second step of each iteration is taken at a tenth of its learning rate."""
    del model
    _note(args, f"step {step_id} of iteration {rollout_id} at {opt_param_scheduler.max_lr}")
    for group in optimizer.param_groups if step_id else ():
        group["lr"] *= 0.1


def _routers(model: Any) -> list[torch.Tensor]:
    return [
        parameter
        for chunk in model
        for name, parameter in chunk.named_parameters()
        if name.endswith("router.weight")
    ]


def others_become_wanted(args: Any, rollout_id: int, step_id: int, model: Any, *_: Any) -> None:
    """Changes the logits of experts 4 and 5 alone: many tokens would go there."""
    del args, rollout_id, step_id
    with torch.no_grad():
        for weight in _routers(model):
            weight[4:6] = 5 * weight[1:3]


def experts_change_names(args: Any, rollout_id: int, step_id: int, model: Any, *_: Any) -> None:
    """Each expert has the logit of the one before it."""
    del args, rollout_id, step_id
    with torch.no_grad():
        for weight in _routers(model):
            weight.copy_(weight.roll(1, 0))


def spoils_a_weight_with_nan(args: Any, rollout_id: int, step_id: int, model: Any, *_: Any) -> None:
    del args, rollout_id, step_id
    _spoil(model, float("nan"))


def spoils_a_weight_with_inf(args: Any, rollout_id: int, step_id: int, model: Any, *_: Any) -> None:
    del args, rollout_id, step_id
    _spoil(model, float("-inf"))


def _spoil(model: Any, number: float) -> None:
    with torch.no_grad():
        [last] = [p for n, p in model[0].named_parameters() if "1.mlp.linear_fc2" in n]
        last[-1, -1] = number
