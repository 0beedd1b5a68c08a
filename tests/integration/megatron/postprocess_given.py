"""Functions for rollout_data_postprocess_path: right ones, and what people get wrong."""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

import numpy as np
import torch


def keeps(row: int, length: int) -> torch.Tensor:
    """Which response tokens of a row stay; of the fifth none."""
    return (torch.arange(length) % 3 != row % 3) & (row != 5)


def masks(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    rollout_data["loss_masks"] = [
        mask * keeps(row, len(mask)) for row, mask in enumerate(rollout_data["loss_masks"])
    ]


def masks_through_numpy(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> Any:
    """The same in place, through arrays that share memory with the tensors."""
    del args, rollout_id
    for row, mask in enumerate(rollout_data["loss_masks"]):
        view = mask.numpy()
        view *= keeps(row, len(mask)).numpy()
    return rollout_data


def everything(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    for mask in rollout_data["loss_masks"]:
        mask.zero_()


def halves(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Advantages halved in the iterations from 1 on."""
    if rollout_id:
        rollout_data["advantages"] = [a * args.factor for a in rollout_data["advantages"]]


def older(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    for row in rollout_data["log_probs"]:
        row += 0.1


def trusts_the_trainer(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Every third token's engine log-prob is said to be the trainer's."""
    del args, rollout_id
    ours, theirs = rollout_data["log_probs"], rollout_data["rollout_log_probs"]
    for row, other in zip(ours, theirs, strict=True):
        other[::3] = row[::3]


def at_random(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    for row in rollout_data["advantages"]:
        row *= random.random() + np.random.rand() + torch.rand(())


def sees_all(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Fails where something of it is missing."""
    del args
    assert rollout_id == 0
    lengths = rollout_data["response_lengths"]
    for name in ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "loss_masks"):
        assert [len(row) for row in rollout_data[name]] == lengths, name
    assert rollout_data["loss_masks"][0].dtype == torch.int32
    assert len(rollout_data["tokens"]) == len(rollout_data["rewards"]) == len(lengths)


def rows_made_anew(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Some rows are replaced by tensors that lie on no GPU, and a fixed one is moved."""
    del args, rollout_id
    lengths = rollout_data["response_lengths"]
    rollout_data["loss_masks"][1] = torch.zeros(lengths[1])
    rollout_data["advantages"][2] = torch.full((lengths[2],), 0.5, dtype=torch.float64)
    rollout_data["tokens"][0] = rollout_data["tokens"][0].cpu()


# Wrong ones.


def gives_masks(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> Any:
    del args, rollout_id
    return {"loss_masks": [mask * 0 for mask in rollout_data["loss_masks"]]}


def no_masks(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    rollout_data["loss_masks"] = None


def one_row_less(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    rollout_data["loss_masks"].pop()


def shorter(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    rollout_data["advantages"][2] = rollout_data["advantages"][2][1:]


def list_of_numbers(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    rollout_data["loss_masks"][1] = rollout_data["loss_masks"][1].tolist()


def soft_masks(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    rollout_data["loss_masks"][2] = rollout_data["loss_masks"][2] * 0.5


def brings_in(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Row 3 has no trained token."""
    del args, rollout_id
    rollout_data["loss_masks"][3] += 1


def nan(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    rollout_data["advantages"][4][0] /= rollout_data["advantages"][4][0] * 0


def raises(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    rollout_data["no_such"]


def exits(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id, rollout_data
    sys.exit(3)


async def awaits(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id, rollout_data


def two(args: Any, rollout_data: dict[str, Any]) -> None:
    del args, rollout_data


def edits_tokens(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    rollout_data["tokens"][0].numpy()[0] = 0


def edits_metadata(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    rollout_data["metadata"][0]["mine"] = 1


def rewards(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    rollout_data["rewards"][0] += 1.0


def unread(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    for row in rollout_data["rollout_log_probs"]:
        row -= 1


def own_column(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    rollout_data["weights"] = [1.0] * len(rollout_data["tokens"])


def takes_away(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    del rollout_data["truncated"]


def never_ends(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id, rollout_data
    threading.Event().wait()


def shows_settings(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del rollout_id, rollout_data
    raise ValueError(f"key {args.sglang_api_key}")


def other_on_each_rank(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id
    for row in rollout_data["advantages"]:
        row += torch.distributed.get_rank()


def fails_on_one_rank(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del args, rollout_id, rollout_data
    if torch.distributed.get_rank():
        raise ValueError("my disk is full")
