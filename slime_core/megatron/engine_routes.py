"""Routes that the engine took, from stored rows to the tokens of a batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from slime_core.batching.types import TrainBatch
from slime_core.errors import DataError
from slime_core.weights.tables import ModelShape

FLAG = "use_rollout_routing_replay"


@dataclass(frozen=True)
class EngineRoutes:
    """What the routers of some layers are to choose.

    Attributes:
        experts: [tokens of the batch, layers, k], uint8 or int16 (see routes_dtype).
        known: bool [tokens], False where the engine tells no route and the router chooses.
    """

    experts: np.ndarray
    known: np.ndarray


def routes_dtype(num_experts: int) -> type[np.generic]:
    """The smallest type of numpy's and torch's that holds the number of any expert."""
    return np.uint8 if num_experts <= 256 else np.int16


def engine_routes(batch: TrainBatch, layers: Sequence[int], shape: ModelShape) -> EngineRoutes:
    """The stored routes of all rows that some step trains.

    An engine has routes of the tokens that it was fed: all but the last one sampled, and those
    that a tool put behind it. No trained token is predicted from these, so whatever experts they
    take, the loss is the same.

    Args:
        layers: which of the model's layers, numbered from 0 as in the model.
        shape: of the model that trains.

    Raises:
        DataError: a trained token is predicted from one without a route, or the routes are those
            of another model.
    """
    assert shape.num_experts is not None and shape.experts_per_token is not None
    size = (len(batch.tokens), len(layers), shape.experts_per_token)
    experts = np.zeros(size, dtype=routes_dtype(shape.num_experts))
    known = np.zeros(len(batch.tokens), dtype=bool)
    chosen = np.asarray(layers, dtype=np.int64)
    for row in (row for step in batch.steps for row in step):
        found = _routes_of_row(batch, row, shape)
        if not len(found):
            continue
        part = found[:, chosen]
        _check_experts(part, layers, shape.num_experts, _named(batch, row))
        first = int(batch.token_offsets[row])
        experts[first : first + len(part)] = part
        known[first : first + len(part)] = True
    return EngineRoutes(experts, known)


def share_of_engine(batch: TrainBatch, rows: Sequence[int]) -> float:
    """Which part of some rows' tokens has routes of the engine."""
    known = sum(0 if (found := _stored(batch, row)) is None else len(found) for row in rows)
    return known / max(1, int(batch.lengths[np.asarray(rows, dtype=np.int64)].sum()))


def _stored(batch: TrainBatch, row: int) -> np.ndarray | None:
    return batch.routes[row] if batch.routes else None


def _routes_of_row(batch: TrainBatch, row: int, shape: ModelShape) -> np.ndarray:
    """[routed tokens, all layers, k]"""
    found, needed, name = _stored(batch, row), _needed(batch, row), _named(batch, row)
    if found is None:
        if needed:
            raise DataError(
                f"{FLAG}: {name} has no routes of the engine. It was imported or generated without "
                "this option, its generate function did not ask for return_routed_experts, or "
                "slime gc --drop-planes experts gave them up: generate it anew, or use "
                "use_routing_replay, which takes the trainer's own"
            )
        return np.zeros((0, shape.num_layers, shape.experts_per_token or 0), dtype=np.uint8)
    if found.ndim != 3 or found.shape[1:] != (shape.num_layers, shape.experts_per_token):
        raise DataError(
            f"{FLAG}: the routes of {name} are {list(found.shape)}, but the trainer's model has "
            f"{shape.num_layers} layers with {shape.experts_per_token} experts a token: engine and "
            "trainer must run the same model"
        )
    if not needed <= len(found) <= batch.lengths[row]:
        raise DataError(
            f"{FLAG}: {name} has routes of {len(found)} of its {batch.lengths[row]} tokens, and "
            f"trained ones are predicted from the first {needed}: each request of its generate "
            "function must ask for return_routed_experts"
        )
    return found


def _needed(batch: TrainBatch, row: int) -> int:
    """Tokens at the row's beginning without whose routes a trained token cannot be predicted."""
    trained = np.flatnonzero(batch.loss_mask[batch.row_response(row)])
    return int(batch.prompt_lengths[row] + trained[-1]) if len(trained) else 0


def _check_experts(part: np.ndarray, layers: Sequence[int], experts: int, name: str) -> None:
    """Raises DataError where a token goes to an expert that is not there, or twice to one."""
    low, high = int(part.min()), int(part.max())
    if low < 0 or high >= experts:
        wrong = (part < 0) | (part >= experts)
        raise DataError(
            f"{FLAG}: {name} goes to expert {low if low < 0 else high} in layer "
            f"{_first(wrong, layers)}, and the trainer's model has {experts}: engine and trainer "
            "must run the same model"
        )
    by_choice = np.ascontiguousarray(np.moveaxis(part, -1, 0))  # comparing is far faster so
    for one, other in combinations(by_choice, 2):
        twice = one == other
        if twice.any():
            raise DataError(
                f"{FLAG}: {name} goes twice to one expert in layer {_first(twice, layers)}, which "
                "no router does: the engine did not record this layer"
            )


def _first(wrong: np.ndarray, layers: Sequence[int]) -> int:
    """The first of some layers where something is wrong. [tokens, layers, ...]"""
    return int(layers[int(np.argwhere(wrong)[:, 1].min())])


def _named(batch: TrainBatch, row: int) -> str:
    return f"row {row} (group {batch.group_ids[row]})"
