"""Which rank runs which rows of an optimizer step, in which micro-batches.

A pure function of lengths and layout: it is computed again when the layout changes, and nothing
that is trained depends on it. What is trained is fixed before, in `select`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_core.batching.partition import (
    Bins,
    fast_partitions,
    first_fit,
    near_equal_partitions,
    split_bins_to,
)
from slime_core.errors import ConfigError, DataError


@dataclass(frozen=True)
class SequenceCost:
    """Work of one sequence of T tokens: linear * T + quadratic * T^2.

    Attributes:
        linear: FLOPs a token outside attention (about 6 x parameters in training).
        quadratic: FLOPs a pair of tokens in attention.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    @classmethod
    def of_transformer(cls, parameters: int, layers: int, attention_width: int) -> SequenceCost:
        """Training FLOPs of a decoder; causal attention counts half.

        Args:
            parameters: weights used for each token, the output layer included.
            layers: number of layers.
            attention_width: heads x head dimension.
        """
        return cls(linear=6.0 * parameters, quadratic=6.0 * layers * attention_width)

    def __call__(self, tokens: int) -> float:
        return self.linear * tokens + self.quadratic * tokens * tokens


@dataclass(frozen=True)
class SchedulePolicy:
    """How a step is cut.

    Attributes:
        micro_batch_size: samples a micro-batch; used where max_tokens is None.
        max_tokens: tokens a micro-batch holds at most (max_tokens_per_gpu x context-parallel
            size). A hard cap.
        cost: balance the ranks by this cost; None deals micro-batches out in turn.
    """

    micro_batch_size: int = 1
    max_tokens: int | None = None
    cost: SequenceCost | None = None

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size must be at least 1, got {self.micro_batch_size}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens_per_gpu must be at least 1, got {self.max_tokens}")


@dataclass(frozen=True)
class StepSchedule:
    """ranks[r][m] holds the rows of micro-batch m on data-parallel rank r.

    All ranks have the same number of micro-batches. Where a step has fewer rows than that needs,
    some are empty: the rank runs padding there, to take part in the collectives.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])


def schedule_step(
    lengths: Sequence[int], rows: Sequence[int], dp_size: int, policy: SchedulePolicy
) -> StepSchedule:
    """Cuts one optimizer step into micro-batches and deals them to data-parallel ranks.

    Args:
        lengths: tokens of each row of the batch, indexed by row.
        rows: the rows of this step.
        dp_size: number of data-parallel ranks.
        policy: static or dynamic micro-batches, cap and balance.

    Returns:
        A schedule in which each row stands exactly once.

    Raises:
        DataError: the step is empty, or a row is longer than the cap.
    """
    if dp_size < 1:
        raise ConfigError(f"the data-parallel size must be at least 1, got {dp_size}")
    if len(rows) == 0:
        raise DataError("an optimizer step has no rows to schedule")
    own = [int(lengths[row]) for row in rows]
    _check_cap(own, rows, policy.max_tokens)
    if policy.cost is None:
        by_rank = _in_turn(own, dp_size, policy)
    else:
        by_rank = _balanced(own, dp_size, policy, policy.cost)
    return StepSchedule(
        tuple(
            tuple(tuple(int(rows[item]) for item in items) for items in micro_batches)
            for micro_batches in by_rank
        )
    )


def _check_cap(own: list[int], rows: Sequence[int], max_tokens: int | None) -> None:
    if max_tokens is None:
        return
    longest = max(range(len(own)), key=own.__getitem__)
    if own[longest] > max_tokens:
        raise DataError(
            f"row {rows[longest]} has {own[longest]} tokens, a micro-batch holds {max_tokens}: "
            "raise --max-tokens-per-gpu, lower --rollout-max-response-len, or set "
            "--overlong-policy to truncate or drop"
        )


def _cut(own: list[int], items: list[int], policy: SchedulePolicy) -> Bins:
    if policy.max_tokens is None:
        size = policy.micro_batch_size
        return [items[start : start + size] for start in range(0, len(items), size)]
    bins = first_fit([own[item] for item in items], policy.max_tokens)
    return [[items[place] for place in places] for places in bins]


def _fill(bins: Bins, own: list[int], count: int) -> Bins:
    split = split_bins_to(bins, own, count)
    return split + [[] for _ in range(count - len(split))]


def _in_turn(own: list[int], dp_size: int, policy: SchedulePolicy) -> list[Bins]:
    bins = _cut(own, list(range(len(own))), policy)
    bins = _fill(bins, own, len(bins) + -len(bins) % dp_size)
    return [bins[rank::dp_size] for rank in range(dp_size)]


def _balanced(
    own: list[int], dp_size: int, policy: SchedulePolicy, cost: SequenceCost
) -> list[Bins]:
    work = [cost(length) for length in own]
    cut = [_cut(own, items, policy) for items in fast_partitions(work, dp_size)]
    count = max(len(bins) for bins in cut)
    short_of_items = any(sum(map(len, bins)) < count for bins in cut)
    if short_of_items or policy.max_tokens is None:
        # Equal counts balance worse, but leave no rank with an empty micro-batch.
        cut = [_cut(own, items, policy) for items in near_equal_partitions(work, dp_size)]
        count = max(len(bins) for bins in cut)
    return [_fill(bins, own, count) for bins in cut]
