"""Several prompts files drawn from by their weights: a pure function of counters.

A pass has as many draws as all files have rows; each file gets its share of them, spread evenly.
A file that has more draws in a pass than rows begins anew (shuffled anew) in the middle of it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence

from slime_core.errors import DataError

Order = Callable[[int, int, int], Sequence[int]]
SEEDS_APART = 1_000_003


class Mixture:
    """Which row of which file a draw takes.

    Args:
        sizes: rows of each file.
        weights: one for each file, above 0.
        order: (rows, seed, pass) -> the order of a file's rows; None for file order.
        seed: of the shuffling; each file has its own.

    Raises:
        DataError: weights that do not fit.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], order: Order | None, seed: int
    ) -> None:
        if len(weights) != len(sizes):
            raise DataError(
                f"prompt_data names {len(sizes)} files and prompt_data_weights {len(weights)} "
                "weights: give one for each file"
            )
        if not all(0 < weight < math.inf for weight in weights) or math.isinf(sum(weights)):
            raise DataError(f"prompt_data_weights must be numbers above 0, not {list(weights)}")
        self._sizes = list(sizes)
        self.shares = _shares(sum(sizes), weights)
        places = sorted(
            ((turn + 0.5) / share, part)
            for part, share in enumerate(self.shares)
            for turn in range(share)
        )
        self._parts = array("I", (part for _, part in places))
        self._turns = array("q", bytes(8 * len(places)))
        seen = [0] * len(sizes)
        for place, part in enumerate(self._parts):
            self._turns[place] = seen[part]
            seen[part] += 1
        self._order = order
        self._seed = seed
        self._orders: dict[int, tuple[int, Sequence[int]]] = {}

    def row(self, data_epoch: int, position: int) -> tuple[int, int]:
        """(file, row of it) of a draw."""
        part = self._parts[position]
        taken = data_epoch * self.shares[part] + self._turns[position]
        own_pass, place = divmod(taken, self._sizes[part])
        if self._order is None:
            return part, place
        known = self._orders.get(part)
        if known is None or known[0] != own_pass:
            seed = self._seed + SEEDS_APART * part
            known = (own_pass, self._order(self._sizes[part], seed, own_pass))
            self._orders[part] = known
        return part, known[1][place]


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Draws of each file in a pass: by weight, at least one, `total` together."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    shares = [max(1, int(value)) for value in exact]
    behind = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for step in range(max(0, total - sum(shares))):
        shares[behind[step % len(shares)]] += 1
    while sum(shares) > total:  # where tiny weights were given their one draw
        shares[max(range(len(shares)), key=lambda i: shares[i])] -= 1
    return shares
