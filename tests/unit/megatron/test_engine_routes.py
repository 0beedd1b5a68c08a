"""Routes of the engine, from rows to tokens of the batch, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slime_core.batching.overlong import apply_overlong_policy
from slime_core.batching.types import TrainBatch
from slime_core.errors import DataError
from slime_core.megatron.engine_routes import engine_routes, share_of_engine
from slime_core.weights.tables import ModelShape
from tests.unit.batching.conftest import build_batch

LAYERS, K = 3, 2
SHAPE = ModelShape(
    model_type="qwen3_moe",
    num_layers=LAYERS,
    hidden_size=8,
    ffn_size=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=50,
    padded_vocab_size=50,
    max_positions=64,
    norm_eps=1e-6,
    tied=True,
    rope_theta=1e6,
    num_experts=300,
    experts_per_token=K,
    expert_ffn_size=8,
)


def routes_of(row: int, tokens: int) -> np.ndarray:
    """[tokens, layers, k]: other experts for each row, token and layer."""
    at = np.arange(tokens)[:, None] * LAYERS + np.arange(LAYERS)
    first = (row * 50 + at) % 299
    return np.stack([first, first + 1], -1).astype(np.uint16)


def routed_batch() -> TrainBatch:
    """Four rows; the engine has no route of the last token of each, row 2 ends with two tokens of
    a tool, and row 3 is not trained and has no routes."""
    mask = [1] * 3 + [1, 0, 1] + [1, 1, 0, 0] + [0, 0]
    batch = build_batch([2, 1, 3, 2], [3, 3, 4, 2], mask=mask, steps=((0, 3), (2, 1)))
    routes = (routes_of(0, 4), routes_of(1, 3), routes_of(2, 4), None)
    return replace(batch, routes=routes)


@pytest.mark.parametrize("layers", [(0, 1, 2), (1,), (2, 0)])
def test_each_token_has_the_routes_of_its_row_and_layers(layers: tuple[int, ...]) -> None:
    batch = routed_batch()
    found = engine_routes(batch, layers, SHAPE)
    assert found.experts.shape == (20, len(layers), K) and found.experts.dtype == np.int16
    known = [[1, 1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0], [0] * 4]
    assert found.known.tolist() == [bool(one) for row in known for one in row]
    for row, tokens in enumerate((4, 3, 4)):
        first = batch.token_offsets[row]
        want = routes_of(row, tokens)[:, list(layers)]
        assert (found.experts[first : first + tokens] == want).all()
    assert share_of_engine(batch, [0, 1, 2, 3]) == 11 / 20
    assert share_of_engine(batch, [3, 1]) == 3 / 8
    assert share_of_engine(replace(batch, routes=()), [1]) == 0


def test_few_experts_take_a_byte() -> None:
    few = replace(SHAPE, num_experts=256)
    one = replace(build_batch([1], [2], mask=[1, 1]), routes=(np.full((2, 3, 2), [0, 255]),))
    assert engine_routes(one, (0,), few).experts.dtype == np.uint8


def test_rows_keep_their_routes_when_chosen_or_cut() -> None:
    batch = routed_batch()
    chosen = batch.select([2, 0])
    assert [len(one) for one in chosen.routes if one is not None] == [4, 4]
    assert chosen.routes[0] is batch.routes[2]
    cut, _ = apply_overlong_policy(batch, 3, "truncate")
    assert cut.lengths.tolist() == [3, 3, 7, 3] and cut.steps == ((0, 3), (1,))
    assert cut.routes[3] is None and (cut.routes[0] == routes_of(0, 3)).all()
    assert engine_routes(cut, (0, 1, 2), SHAPE).known.sum() == 6
    with pytest.raises(DataError, match="routes has 1 values, expected 4"):
        replace(batch, routes=(None,))


def without(row: int) -> TrainBatch:
    batch = routed_batch()
    return replace(batch, routes=tuple(None if i == row else r for i, r in enumerate(batch.routes)))


def changed(row: int, routes: np.ndarray) -> TrainBatch:
    batch = routed_batch()
    told = tuple(routes if i == row else one for i, one in enumerate(batch.routes))
    return replace(batch, routes=told)


def with_expert(number: int) -> np.ndarray:
    routes = routes_of(1, 3).astype(np.int64)
    routes[2, 1, 1] = number
    return routes


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (replace(routed_batch(), routes=()), r"row 0 \(group 0\) has no routes of the engine"),
        (without(2), "row 2 .* --drop-planes experts .* use_routing_replay"),
        (changed(1, routes_of(1, 2)), "row 1 .* of 2 of its 4 tokens, .* from the first 3: each"),
        (changed(1, routes_of(1, 5)), "row 1 .* routes of 5 of its 4 tokens"),
        (changed(1, routes_of(1, 3)[:, :2]), r"are \[3, 2, 2\], but .* 3 layers with 2 experts"),
        (changed(1, routes_of(1, 3)[..., :1]), r"are \[3, 3, 1\], but"),
        (changed(1, routes_of(1, 3).reshape(-1)), r"are \[18\], but"),
        (changed(1, with_expert(300)), "goes to expert 300 in layer 1, and .* has 300"),
        (changed(1, with_expert(-1)), "goes to expert -1 in layer 1"),
        (changed(1, np.zeros((3, 3, 2), np.uint8)), "twice to one expert in layer 0"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_a_sentence(batch: TrainBatch, words: str) -> None:
    with pytest.raises(DataError, match="^use_rollout_routing_replay: .*" + words):
        engine_routes(batch, (0, 1, 2), SHAPE)


def test_layers_without_experts_may_hold_anything() -> None:
    """An engine fills layers without experts with zeros."""
    routes = routes_of(1, 3)
    routes[:, 0] = 0
    assert engine_routes(changed(1, routes), (1, 2), SHAPE).known.sum() == 11
