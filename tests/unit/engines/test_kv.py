"""The key-value pool: rows stay with their requests through every change."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.engines.embedded.kv import KVPool, width_class
from slime_core.engines.embedded.request import Request
from slime_core.engines.embedded.sampling_params import SamplingParams


def one(mark: int) -> Request:
    return Request(str(mark), [mark], SamplingParams(), 0, 1)


def rows(marks: list[int], positions: int) -> list:
    """Two layers whose values name the request."""
    base = torch.tensor(marks, dtype=torch.float32)[:, None, None, None]
    block = base.expand(-1, 2, positions, 3)
    return [(block + 0.25, block + 0.5), (block + 0.75, block + 1.0)]


def held(pool: KVPool) -> dict[int, float]:
    """Per request the first value of its row in layer 0's keys."""
    return {
        request.prompt[0]: float(pool.layers[0][0][row, 0, 0, 0])
        for row, request in enumerate(pool.requests)
    }


@given(st.integers(1, 5000), st.sampled_from([8, 16]))
def test_width_class_holds_and_never_doubles(tokens, smallest):
    width = width_class(tokens, smallest)
    assert width >= tokens
    assert width <= max(smallest, 16, 2 * tokens)
    assert width_class(width, smallest) == width
    assert width_class(tokens + 1, smallest) >= width


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 6), st.data()), min_size=1, max_size=8))
def test_rows_stay_with_their_requests(changes):
    pool = KVPool(16, 1)
    next_mark, alive = 0, set()
    for count, data in changes:
        marks = list(range(next_mark, next_mark + count))
        next_mark += count
        pool.append([one(mark) for mark in marks], rows(marks, 4))
        alive |= set(marks)
        gone = data.draw(st.sets(st.integers(0, len(pool.requests) - 1)))
        alive -= {pool.requests[i].prompt[0] for i in gone}
        pool.remove(gone)
        assert held(pool) == {mark: mark + 0.25 for mark in alive}


def test_widen_keeps_rows_and_gives_zeros():
    pool = KVPool(16, 1)
    pool.append([one(1), one(2)], rows([1, 2], 16))
    pool.widen(32)
    assert held(pool) == {1: 1.25, 2: 2.25}
    assert pool.layers[0][0].shape[2] == 32
    assert not pool.layers[0][0][:2, :, 16:].any()


def test_a_new_row_does_not_see_what_an_old_one_left():
    pool = KVPool(16, 1)
    pool.append([one(1)], [(k * float("nan"), v) for k, v in rows([1], 16)])
    pool.remove({0})
    pool.append([one(2)], rows([2], 4))
    assert torch.isfinite(pool.layers[0][0][0]).all()


def test_a_pool_has_its_fewest_rows_even_when_empty():
    pool = KVPool(16, 8)
    pool.append([one(1)], rows([1], 4))
    assert pool.rows == 8
    assert pool.capacity >= 8
    assert torch.equal(pool.rows_of([0])[1][1][0, :, :4], rows([1], 4)[1][1][0])
