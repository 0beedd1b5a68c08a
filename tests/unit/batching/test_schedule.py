import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.batching.schedule import SchedulePolicy, SequenceCost, schedule_step
from slime_core.errors import ConfigError, DataError

CAP = 64
policies = st.sampled_from(
    [
        SchedulePolicy(micro_batch_size=1),
        SchedulePolicy(micro_batch_size=3),
        SchedulePolicy(max_tokens=CAP),
        SchedulePolicy(micro_batch_size=2, cost=SequenceCost(1.0, 0.01)),
        SchedulePolicy(max_tokens=CAP, cost=SequenceCost(1.0, 0.01)),
    ]
)


@given(
    lengths=st.lists(st.integers(1, CAP), min_size=1, max_size=40),
    dp_size=st.integers(1, 5),
    policy=policies,
    shift=st.integers(0, 3),
)
def test_each_row_once_equal_counts_and_no_cap_exceeded(lengths, dp_size, policy, shift):
    lengths = [CAP] * shift + lengths
    rows = list(range(shift, len(lengths)))
    schedule = schedule_step(lengths, rows, dp_size, policy)
    assert len(schedule.ranks) == dp_size
    assert {len(rank) for rank in schedule.ranks} == {schedule.num_micro_batches}
    micro_batches = [mb for rank in schedule.ranks for mb in rank]
    assert sorted(row for mb in micro_batches for row in mb) == rows
    if policy.max_tokens:
        assert all(sum(lengths[row] for row in mb) <= CAP for mb in micro_batches)
    else:
        assert all(len(mb) <= policy.micro_batch_size for mb in micro_batches)
    if len(rows) % dp_size == 0:
        assert all(micro_batches), "a step that divides evenly needs no empty micro-batch"


def test_balance_by_cost_evens_out_the_ranks():
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(7, 0.9, 256).astype(int) + 1, 16384).tolist()
    cost = SequenceCost.of_transformer(parameters=600_000_000, layers=28, attention_width=2048)

    def spread(policy):
        schedule = schedule_step(lengths, range(256), 8, policy)
        work = [sum(cost(lengths[row]) for mb in rank for row in mb) for rank in schedule.ranks]
        return (max(work) - min(work)) / max(work)

    assert spread(SchedulePolicy(max_tokens=16384, cost=cost)) < 0.01
    assert spread(SchedulePolicy(max_tokens=16384)) > 0.05


def test_a_row_over_the_cap_names_row_length_and_cap():
    with pytest.raises(DataError, match=r"row 7 has 65 tokens, a micro-batch holds 64"):
        schedule_step([1] * 7 + [65], [3, 7], 1, SchedulePolicy(max_tokens=64))


def test_numbers_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="micro_batch_size"):
        SchedulePolicy(micro_batch_size=0)
    with pytest.raises(ConfigError, match="max_tokens_per_gpu"):
        SchedulePolicy(max_tokens=0)
    with pytest.raises(ConfigError, match="data-parallel"):
        schedule_step([1], [0], 0, SchedulePolicy())
    with pytest.raises(DataError, match="no rows"):
        schedule_step([1], [], 1, SchedulePolicy())
