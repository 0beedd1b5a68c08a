"""Bin packing and number partitioning: first-fit, Karmarkar-Karp, splitting of bins."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from slime_core.errors import DataError

Bins = list[list[int]]


def first_fit(lengths: Sequence[int], capacity: int) -> Bins:
    """Puts each item into the first bin that still has room, in the order given.

    An item longer than the capacity sits alone. A tree of the largest remaining room finds the
    bin in O(log n), which keeps thousands of sequences far below a millisecond each thousand.

    Args:
        lengths: [n] tokens of each item.
        capacity: tokens of a bin, > 0.

    Returns:
        Bins of item numbers; bins in the order of their first item.
    """
    if capacity < 1:
        raise DataError(f"first-fit: the capacity must be at least 1 token, got {capacity}")
    leaves = 1
    while leaves < len(lengths):
        leaves *= 2
    room = [capacity] * (2 * leaves)  # a heap-shaped tree; node i has children 2i and 2i + 1
    bins: Bins = []
    for item, length in enumerate(lengths):
        need = min(length, capacity)
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < need:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(item)
        room[node] -= need
        while node > 1:
            node //= 2
            largest = max(room[2 * node], room[2 * node + 1])
            if room[node] == largest:
                break
            room[node] = largest
    return bins


def balanced_partitions(weights: Sequence[float], k: int, equal_size: bool = False) -> Bins:
    """Splits items into k sets of nearly equal weight: largest differencing (Karmarkar-Karp).

    Karmarkar and Karp, "The differencing method of set partitioning", 1982.

    Args:
        weights: [n] weights >= 0.
        k: number of sets, >= 1.
        equal_size: all sets get n / k items (n must be a multiple of k). Works on n / k tuples
            of k items instead of n single items, hence also much faster for many items.

    Returns:
        k sets of item numbers, each sorted, each item once.

    Raises:
        DataError: k < 1, or n is not a multiple of k where equal sizes are asked for.
    """
    n = len(weights)
    if k < 1 or (equal_size and n % k):
        raise DataError(f"cannot split {n} items into {k} sets" + " of equal size" * equal_size)
    order = sorted(range(n), key=lambda item: (weights[item], item))
    width = k if equal_size else 1
    heap = []
    for start in range(0, n, width):
        state = [(weights[item], [item]) for item in order[start : start + width]]
        state = [(0.0, []) for _ in range(k - width)] + state
        heap.append((state[0][0] - state[-1][0], start, state))
    heapq.heapify(heap)
    tie = n
    while len(heap) > 1:
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        # The heaviest set of one state joins the lightest of the other.
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda pair: pair[0])
        tie += 1
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], tie, merged))
    sets = [items for _, items in heap[0][2]] if heap else [[] for _ in range(k)]
    return [sorted(items) for items in sets]


def near_equal_partitions(weights: Sequence[float], k: int) -> Bins:
    """Balanced sets whose sizes differ by one at most, for any number of items."""
    missing = -len(weights) % k
    sets = balanced_partitions([*weights, *([0.0] * missing)], k, equal_size=True)
    return [[item for item in items if item < len(weights)] for items in sets]


def fast_partitions(weights: Sequence[float], k: int) -> Bins:
    """Balanced sets of free sizes in time that hardly grows with k.

    Differencing costs n * k, so it places the heaviest items only, which decide the balance; the
    rest go one by one, heaviest first, to the lightest set.
    """
    differenced = max(2 * k, 4096 // k)
    order = sorted(range(len(weights)), key=lambda item: (-weights[item], item))
    head = order[:differenced]
    sets = [
        [head[place] for place in places]
        for places in balanced_partitions([weights[item] for item in head], k)
    ]
    heap = [(sum(weights[item] for item in items), number) for number, items in enumerate(sets)]
    heapq.heapify(heap)
    for item in order[differenced:]:
        weight, number = heap[0]
        sets[number].append(item)
        heapq.heapreplace(heap, (weight + weights[item], number))
    return [sorted(items) for items in sets]


def split_bins_to(bins: Bins, lengths: Sequence[int], target: int) -> Bins:
    """Splits bins until there are `target` of them; stops early when all hold one item.

    The heaviest bin of several items is halved each time: its items, longest first, go to the
    lighter half.

    Args:
        bins: bins of item numbers.
        lengths: [n] tokens of each item.
        target: wanted number of bins, not below the present one.
    """
    out = [list(items) for items in bins]
    if target < len(out):
        raise DataError(f"cannot split {len(out)} bins into fewer ({target})")
    heap = [
        (-sum(lengths[i] for i in items), place)
        for place, items in enumerate(out)
        if len(items) > 1
    ]
    heapq.heapify(heap)
    while len(out) < target and heap:
        _, place = heapq.heappop(heap)
        halves, sums = ([], []), [0, 0]
        for item in sorted(out[place], key=lambda i: (-lengths[i], i)):
            lighter = 0 if sums[0] <= sums[1] else 1
            halves[lighter].append(item)
            sums[lighter] += lengths[item]
        out[place], second = sorted(halves[0]), sorted(halves[1])
        out.append(second)
        for where in (place, len(out) - 1):
            if len(out[where]) > 1:
                heapq.heappush(heap, (-sum(lengths[i] for i in out[where]), where))
    return out
