import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.batching.partition import (
    balanced_partitions,
    fast_partitions,
    first_fit,
    near_equal_partitions,
    split_bins_to,
)
from slime_core.errors import DataError

lengths_lists = st.lists(st.integers(1, 50), min_size=1, max_size=60)


def each_once(bins, n):
    return sorted(item for items in bins for item in items) == list(range(n))


@given(lengths=lengths_lists, capacity=st.integers(1, 60))
def test_first_fit_takes_the_first_bin_with_room(lengths, capacity):
    bins = first_fit(lengths, capacity)
    expected, room = [], []
    for item, length in enumerate(lengths):
        place = next((b for b, left in enumerate(room) if left >= length), None)
        if place is None:
            place = len(room)
            expected.append([])
            room.append(capacity)
        expected[place].append(item)
        room[place] -= length
    assert bins == expected


def test_first_fit_of_nothing_is_nothing():
    assert first_fit([], 4) == []
    with pytest.raises(DataError, match="at least 1 token"):
        first_fit([1], 0)


@given(weights=lengths_lists, k=st.integers(1, 8))
def test_partitions_cover_each_item_once(weights, k):
    assert each_once(balanced_partitions(weights, k), len(weights))
    assert each_once(fast_partitions(weights, k), len(weights))
    near = near_equal_partitions(weights, k)
    assert each_once(near, len(weights))
    sizes = [len(items) for items in near]
    assert max(sizes) - min(sizes) <= 1


@given(weights=st.lists(st.integers(1, 50), min_size=2, max_size=40))
def test_two_sets_differ_by_less_than_the_heaviest_item(weights):
    for sets in (balanced_partitions(weights, 2), near_equal_partitions(weights, 2)):
        sums = [sum(weights[i] for i in items) for items in sets]
        assert abs(sums[0] - sums[1]) <= max(weights)


def test_free_sizes_balance_one_heavy_item_against_many():
    sets = balanced_partitions([10] + [1] * 10, 2)
    assert sorted(map(len, sets)) == [1, 10]


def test_equal_sizes_need_a_multiple():
    assert balanced_partitions([], 3) == [[], [], []]
    with pytest.raises(DataError, match="5 items into 2 sets of equal size"):
        balanced_partitions([1] * 5, 2, equal_size=True)


@given(lengths=lengths_lists, capacity=st.integers(1, 60), more=st.integers(0, 30))
def test_splitting_keeps_items_and_never_fills_a_bin_further(lengths, capacity, more):
    bins = first_fit(lengths, capacity)
    target = len(bins) + more
    split = split_bins_to(bins, lengths, target)
    assert each_once(split, len(lengths))
    assert len(split) == min(target, len(lengths))
    assert all(split)
    heaviest = max(sum(lengths[i] for i in items) for items in bins)
    assert max(sum(lengths[i] for i in items) for items in split) <= heaviest


def test_splitting_refuses_to_merge():
    with pytest.raises(DataError, match="into fewer"):
        split_bins_to([[0], [1]], [1, 1], 1)


@pytest.mark.parametrize("k", [2, 8, 64])
def test_fast_partitions_are_as_even_as_full_differencing_for_many_items(k):
    rng = np.random.default_rng(0)
    weights = rng.lognormal(7.5, 0.8, 2048).tolist()
    sums = [sum(weights[i] for i in items) for items in fast_partitions(weights, k)]
    assert (max(sums) - min(sums)) / max(sums) < 0.01
