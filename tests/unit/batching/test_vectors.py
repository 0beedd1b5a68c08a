"""Known values of tests/vectors/numeric.jsonl that concern batching."""

import json
from pathlib import Path

import pytest

from slime_core.batching.context_parallel import zigzag_ranges
from slime_core.batching.masks import response_length
from slime_core.batching.partition import balanced_partitions, first_fit, split_bins_to
from slime_core.batching.schedule import SchedulePolicy, schedule_step
from slime_core.batching.select import optimizer_steps

VECTORS = Path(__file__).parents[2] / "vectors" / "numeric.jsonl"
ROWS = [
    row
    for row in map(json.loads, VECTORS.read_text().splitlines())
    if row["kind"] == "packing" or row["fn"] == "response_lengths_from_masks"
]


def partitions(given, expected):
    sets = balanced_partitions(given["lengths"], given["k"], given["equal_size"])
    assert sorted(i for items in sets for i in items) == list(range(len(given["lengths"])))
    if given["equal_size"]:
        assert len({len(items) for items in sets}) == 1
    sums = [sum(given["lengths"][i] for i in items) for items in sets]
    assert max(sums) - min(sums) <= expected["max_minus_min"]


def bins(given, expected):
    assert first_fit(given["lengths"], given["capacity"]) == expected


def split(given, expected):
    result = split_bins_to(given["bins"], given["lengths"], given["target"])
    assert sorted(map(sorted, result)) == sorted(map(sorted, expected))


def dynamic(given, expected):
    """The row numbers the rows of each rank; ours keeps the batch's numbers."""
    assert not given["balance"]
    steps = optimizer_steps(
        given["rollout_ids"],
        given["global_batch"],
        len(given["rollout_ids"]) // given["global_batch"],
    )
    assert list(map(len, steps)) == expected["global_batch_sizes"]
    policy = SchedulePolicy(max_tokens=given["max_tokens"])
    schedules = [schedule_step(given["lengths"], step, given["dp"], policy) for step in steps]
    assert [s.num_micro_batches for s in schedules] == expected["num_micro"]
    for rank in range(given["dp"]):
        names = expected["partitions"][rank]
        theirs = [[names[i] for i in mb] for mb in expected["micro_batches"][rank]]
        assert [list(mb) for s in schedules for mb in s.ranks[rank]] == theirs


def zigzag(given, expected):
    for rank, share in enumerate(expected):
        ours = zigzag_ranges(given["total"], given["response"], given["cp"], rank)
        assert ours.chunk == share["chunk"]
        for name in ("chunks", "logits", "tokens"):
            assert [list(part) for part in getattr(ours, name)] == share[name]


def lengths(given, expected):
    assert [response_length(mask) for mask in given["loss_masks"]] == expected


CHECKS = {
    "balanced_partitions": partitions,
    "first_fit": bins,
    "split_bins_to": split,
    "dp_schedule_dynamic": dynamic,
    "cp_zigzag_offsets": zigzag,
    "response_lengths_from_masks": lengths,
}


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['id']}-{row['fn']}" for row in ROWS])
def test_known_value(row):
    CHECKS[row["fn"]](row["input"], row["expected"])
