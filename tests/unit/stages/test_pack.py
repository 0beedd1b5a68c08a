"""Reward and pack: what an iteration trains follows from the rows of its segment alone."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core.errors import DataError, PluginError, RewardError, StoreError
from slime_core.refs import Ref
from slime_core.run.context import RunContext
from slime_core.sample import Sample, Status
from slime_core.stages.pack import pack
from slime_core.stages.reward import reward
from slime_core.store.batch import BatchContent, read_batch
from slime_core.store.load import load_train_batch
from slime_core.store.parts import GroupRows
from slime_core.store.seal import read_seal
from tests.unit.stages.standins import Lab
from tests.unit.store.builders import finished_sample, group_rows, seal_segment, write_groups


def packed(ctx: RunContext, *parts: list[GroupRows], epoch: int = 0) -> BatchContent:
    """Stores the parts, seals the segment, and runs both stages."""
    for seq, part in enumerate(parts):
        write_groups(ctx.backend, 0, part, epoch, seq)
    seal = seal_segment(ctx.backend, 0).ref()

    async def body() -> Ref:
        scored = await reward(ctx, seal)
        assert (scored.kind, scored.digest) == ("scores", seal.digest)
        return await pack(ctx, scored)

    ref = asyncio.run(body())
    batch = read_batch(ctx.backend, 0)
    assert batch is not None and ref.digest == batch.digest and not ref.from_store
    return batch.content


def lab(tmp_path: Path, name: str = "a", **overrides: Any) -> RunContext:
    return Lab(tmp_path / name, **overrides).start()


def rows(group: int, *rewards: float, **changes: Any) -> GroupRows:
    samples = [finished_sample(group, i) for i in range(len(rewards))]
    for sample, value in zip(samples, rewards, strict=True):
        sample.reward = value
    return replace(group_rows(group), samples=samples, **changes)


def test_the_batch_names_every_kept_group_in_the_order_of_its_draw(tmp_path):
    ctx = lab(tmp_path)
    content = packed(ctx, [group_rows(1)], [group_rows(0)])
    seal = read_seal(ctx.backend, 0)
    assert seal is not None and content.seals == {0: seal.digest}
    assert [(g.group_id, g.attempt, g.segment, g.rows) for g in content.groups] == [
        (0, 0, 0, 4),
        (1, 0, 0, 4),
    ]
    assert content.steps == (tuple(range(8)),) and content.unused == ()
    assert content.rewards == pytest.approx([-0.8660, 0.8660] * 4, abs=1e-4), "(r - 1/2) / 0.5774"
    assert content.raw_rewards == [0.0, 1.0] * 4
    assert content.tokens == sum(s.response_length for g in (0, 1) for s in group_rows(g).samples)


def test_neither_parts_nor_their_order_nor_the_owner_change_the_batch(tmp_path):
    first = packed(lab(tmp_path, "a"), [group_rows(0)], [group_rows(1)])
    second = packed(lab(tmp_path, "b"), [group_rows(1), group_rows(0)], epoch=3)
    assert first == second


def test_a_batch_that_is_packed_already_is_returned_as_it_is(tmp_path):
    ctx = lab(tmp_path)
    packed(ctx, [group_rows(0), group_rows(1)])
    again = asyncio.run(pack(ctx, Ref("", "scores", 0)))
    assert again.from_store


def test_dropped_and_surplus_groups_are_unused_with_their_reason(tmp_path):
    dropped = rows(1, 1.0, 1.0, verdict="dropped", reason="zero_std_1.0")
    failed = rows(0, 0.0, 0.0, verdict="failed", reason="RewardError")
    later = [replace(group_rows(0), attempt=1), group_rows(2), group_rows(3)]
    content = packed(lab(tmp_path), [failed, dropped], later)
    assert [(g.group_id, g.attempt) for g in content.groups] == [(0, 1), (2, 0)]
    assert content.unused == ((1, 0, 0, "zero_std_1.0"), (3, 0, 0, "surplus"))
    assert content.metrics["rollout/groups/dropped_zero_std_1.0"] == 1.0
    assert content.metrics["rollout/groups/failed_RewardError"] == 1.0


def test_denominators_count_trained_tokens_of_the_whole_rollout(tmp_path):
    group = rows(0, 0.0, 1.0, 2.0, 2.0)
    masked, removed, one, other = group.samples
    masked.loss_mask = [0] * masked.response_length
    removed.remove_sample = True
    for sibling in (one, other):
        sibling.rollout_id = 7  # two rows of one rollout
    content = packed(lab(tmp_path, num_steps_per_rollout=1), [group, group_rows(1)])
    both = float(one.response_length + other.response_length)
    assert content.denominators[:4] == [0.0, 0.0, both, both]
    ids = content.rollout_ids
    assert ids[2] == ids[3] and len(set(ids)) == 7
    expected = [-1.0, 0.0, 1.0, 1.0]  # of 0, 1, 2: siblings count once in mean and deviation
    assert content.rewards[:4] == pytest.approx(expected, abs=1e-5)


def test_siblings_stay_in_one_optimizer_step(tmp_path):
    group = rows(0, *[1.0, 2.0, 3.0, 4.0, 5.0])
    group.samples[2].rollout_id = group.samples[3].rollout_id = 9
    content = packed(lab(tmp_path, num_steps_per_rollout=2), [group, rows(1, 0.0, 1.0, 2.0, 3.0)])
    assert content.steps == ((0, 1, 2, 3, 4), (5, 6, 7, 8))


def test_rollouts_that_do_not_divide_into_steps_are_refused(tmp_path):
    ctx = lab(tmp_path, num_steps_per_rollout=2)
    with pytest.raises(DataError, match="the batch has 7 rollouts"):
        packed(ctx, [rows(0, 1.0, 2.0, 3.0), group_rows(1)])
    assert read_batch(ctx.backend, 0) is None


def test_a_segment_of_an_earlier_smaller_batch_size_is_trained_as_it_is(tmp_path, caplog):
    """The configuration was changed while the segment was sealed and not yet trained."""
    content = packed(lab(tmp_path, rollout_batch_size=4), [group_rows(0), group_rows(1)])
    assert [group.group_id for group in content.groups] == [0, 1]
    assert "iteration 0 trains 2 groups" in caplog.text


def test_a_segment_without_a_kept_group_is_refused(tmp_path):
    dropped = [rows(group, 1.0, verdict="dropped", reason="x") for group in (0, 1)]
    with pytest.raises(DataError, match="rollout_batch_size = 2 groups, only 0 of 2"):
        packed(lab(tmp_path), dropped)


def test_an_open_segment_is_refused(tmp_path):
    with pytest.raises(StoreError, match="segment 0 is not sealed yet; generate it first"):
        asyncio.run(pack(lab(tmp_path), Ref("", "scores", 0)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_stops_the_iteration(tmp_path, value):
    with pytest.raises(RewardError, match="group 1 of segment 0 has a reward that is no number"):
        packed(lab(tmp_path), [group_rows(0), rows(1, 0.0, value)])


def test_a_row_without_a_reward_stops_the_iteration(tmp_path):
    group = group_rows(1)
    group.samples[2].reward = None
    with pytest.raises(RewardError, match="has no reward; set reward_key"):
        packed(lab(tmp_path), [group_rows(0), group])


def test_a_row_without_its_grader_stops_the_iteration(tmp_path):
    with pytest.raises(RewardError, match="group 0 of segment 0 has no grader digest"):
        packed(lab(tmp_path), [replace(group_rows(0), grader_digest=None), group_rows(1)])


def test_one_entry_of_many_rewards_is_trained(tmp_path):
    groups = [rows(group, 0.0, 0.0) for group in (0, 1)]
    for group in groups:
        for i, sample in enumerate(group.samples):
            sample.reward = {"score": float(i), "length": 9.0}
    content = packed(lab(tmp_path, reward_key="score"), groups)
    assert content.raw_rewards == [0.0, 1.0, 0.0, 1.0]
    with pytest.raises(RewardError, match="no reward 'other'"):
        packed(lab(tmp_path, "b", reward_key="other"), groups)


def test_metrics_describe_the_rows_that_are_trained(tmp_path):
    lengths = {0: [1, 2], 1: [3, 10]}
    groups = []
    for group, counts in lengths.items():
        samples: list[Sample] = []
        for i, count in enumerate(counts):
            sample = finished_sample(group, i, length=count)
            sample.reward = float(group)
            samples.append(sample)
        groups.append(replace(group_rows(group), samples=samples))
    groups[1].samples[1].status = Status.TRUNCATED
    metrics = packed(lab(tmp_path), groups).metrics
    assert metrics == {
        "rollout/raw_reward": 0.5,
        "rollout/rewards": 0.0,
        "rollout/response_len/mean": 4.0,
        "rollout/response_len/max": 10.0,
        "rollout/response_len/min": 1.0,
        "rollout/response_len/median": 2.5,
        "rollout/response_tokens": 16.0,
        "rollout/truncated_ratio": 0.25,
        "rollout/zero_std_groups": 2.0,
        "rollout/zero_std/count_0.0": 1.0,
        "rollout/zero_std/count_1.0": 1.0,
        "rollout/raw_reward/std": 0.5,
        "rollout/total_lengths/mean": 7.0,  # prompts of 3 tokens
        "rollout/total_lengths/max": 13.0,
        "rollout/trained_tokens": 16.0,
        "rollout/repetition_frac": 0.0,
        "rollout/correct_length/p25": 4.75,  # of 3 and 10 tokens, the right answers
        "rollout/correct_length/p50": 6.5,
        "rollout/correct_length/p75": 8.25,
        "rollout/correct_length/p100": 10.0,
        "passrate/pass@1": 0.5,
        "passrate/pass@2": 0.5,
    }


def test_what_is_packed_is_what_the_trainer_loads(tmp_path):
    ctx = lab(tmp_path)
    group = group_rows(1)
    content = packed(ctx, [group], [group_rows(0)])
    batch = read_batch(ctx.backend, 0)
    assert batch is not None
    loaded = load_train_batch(ctx.backend, batch)
    assert loaded.group_ids.tolist() == [0] * 4 + [1] * 4
    assert loaded.response_lengths.sum() == content.tokens
    first = group.samples[0]
    start, end = loaded.token_offsets[4], loaded.token_offsets[5]
    assert loaded.tokens[start:end].tolist() == first.tokens
    np.testing.assert_array_equal(loaded.denominators, content.denominators)


def ungraded(group: GroupRows, row: int) -> GroupRows:
    sample = group.samples[row]
    sample.remove_sample, sample.reward = True, 0.0
    sample.metadata = sample.metadata | {"reward_error": {"reason": "timeout", "message": "m"}}
    return group


def test_an_answer_that_could_not_be_graded_says_nothing_about_its_siblings(tmp_path):
    content = packed(lab(tmp_path), [ungraded(rows(0, 1.0, 0.0, 3.0, 5.0), 1), rows(1, 1, 1, 1, 1)])
    expected = (np.array([1.0, 3.0, 5.0]) - 3.0) / (2.0 + 1e-6)
    assert content.rewards[:4] == pytest.approx([expected[0], 0.0, *expected[1:]])
    assert content.metrics["rollout/raw_reward"] == pytest.approx(13 / 7)
    assert content.metrics["rollout/reward_error/timeout"] == 1.0
    assert content.denominators[1] == 0.0


def test_a_zero_for_an_ungraded_answer_counts_where_the_policy_wants_it(tmp_path):
    group = ungraded(rows(0, 1.0, 0.0, 3.0, 4.0), 1)
    group.samples[1].remove_sample = False
    content = packed(lab(tmp_path), [group, rows(1, 1, 1, 1, 1)])
    assert content.rewards[:4] == pytest.approx(
        (np.array([1, 0, 3, 4]) - 2) / (np.std([1, 0, 3, 4], ddof=1) + 1e-6)
    )


def test_each_key_of_dict_rewards_is_a_metric(tmp_path):
    groups = [rows(0, 0, 0, 0, 0), rows(1, 0, 0, 0, 0)]
    for place, sample in enumerate(s for group in groups for s in group.samples):
        sample.reward = {"score": place % 2, "style": 0.5, "note": "text"}
    content = packed(lab(tmp_path, reward_key="score"), groups)
    assert content.raw_rewards == [0.0, 1.0] * 4
    found = {k: v for k, v in content.metrics.items() if k.startswith("rollout/reward/")}
    assert found == {"rollout/reward/score": 0.5, "rollout/reward/style": 0.5}


def test_turns_are_counted_where_rows_say_how_many(tmp_path):
    samples = [finished_sample(0, i, length=length) for i, length in enumerate((2, 4, 6, 12))]
    for count, sample in enumerate(samples, 1):
        sample.metadata = sample.metadata | {"round_number": count}
        sample.reward = 0.0
        sample.loss_mask = [1, *[0] * (sample.response_length - 1)]  # the rest a tool answered
    group = replace(group_rows(0), samples=samples)
    metrics = packed(lab(tmp_path), [group, group_rows(1)]).metrics
    assert metrics["rollout/round_number"] == 2.5
    found = {k: v for k, v in metrics.items() if k.startswith("multi_turn/")}
    expected = {
        "multi_turn_metric/round_number_": (2.5, 2.5, 4.0, 1.0),
        "raw_response_length/": (6.0, 5.0, 12.0, 2.0),
        "wo_obs_response_length/": (1.0, 1.0, 1.0, 1.0),
    }
    statistics = ("mean", "median", "max", "min")
    assert found == {
        f"multi_turn/{name}{statistic}": value
        for name, values in expected.items()
        for statistic, value in zip(statistics, values, strict=True)
    }


def test_pass_rates_are_of_rollouts_that_could_be_graded(tmp_path):
    first, second = rows(0, 1.0, 1.0, 0.0, 0.5, 0.0), ungraded(rows(1, 1.0, 0.0, 0.0), 2)
    for sibling in first.samples[:2]:
        sibling.rollout_id = 7  # one try in two rows
    metrics = packed(lab(tmp_path, num_steps_per_rollout=1), [first, second]).metrics
    found = {k: v for k, v in metrics.items() if k.startswith("passrate/")}
    # One of four and one of two: 1/4 and 1/2, 1 - C(3, 2) / C(4, 2) and 1; four tries has one.
    assert found == pytest.approx(
        {"passrate/pass@1": 0.375, "passrate/pass@2": 0.75, "passrate/pass@4": 1.0}
    )


def test_without_a_right_answer_there_is_no_length_of_right_ones(tmp_path):
    metrics = packed(lab(tmp_path), [rows(0, 0.0, 0.9), rows(1, 2.0, -1.0)]).metrics
    assert not [name for name in metrics if name.startswith("rollout/correct_length")]
    assert metrics["passrate/pass@2"] == 0.0


def test_spare_groups_fill_a_batch_and_filtered_ones_are_counted_by_reason(tmp_path):
    spare = rows(1, 1, 1, 1, 1, verdict="spare", reason="dynamic_filter/zero_std_1.0")
    gone = rows(0, 0, 0, 0, 0, verdict="dropped", reason="dynamic_filter/zero_std_0.0")
    content = packed(lab(tmp_path), [gone, spare, group_rows(2)])
    assert [group.group_id for group in content.groups] == [1, 2]
    assert content.metrics["rollout/dynamic_filter/drop_zero_std_0.0"] == 1.0
    assert content.metrics["rollout/dynamic_filter/spare_zero_std_1.0"] == 1.0
    enough = packed(lab(tmp_path, "b"), [spare, group_rows(2), group_rows(3)])
    assert [group.group_id for group in enough.groups] == [2, 3]
    assert enough.unused == ((1, 0, 0, "dynamic_filter/zero_std_1.0"),)


def test_overlong_answers_lose_reward_before_normalisation_and_keep_the_raw_one(tmp_path):
    options = {"reward_shaping": "overlong", "overlong_buffer_len": 4, "overlong_penalty_factor": 2}
    ctx = lab(tmp_path, disable_rewards_normalization=True, **options)
    limit = ctx.config.rollout.rollout_max_response_len
    lengths = [1, limit - 3, limit - 2, limit]
    samples = [finished_sample(0, i, length) for i, length in enumerate(lengths)]
    for sample in samples:
        sample.reward = 1.0
    content = packed(ctx, [replace(group_rows(0), samples=samples), rows(1, 1, 1, 1, 1)])
    assert content.rewards[:4] == pytest.approx([1.0, 0.5, 0.0, -1.0])
    assert content.raw_rewards[:4] == [1.0] * 4
    assert content.metrics["rollout/reward_shaping"] == pytest.approx(-4 / 8), (
        "one of the others is of limit - 3"
    )


def test_cosine_shaping_prefers_short_right_answers(tmp_path):
    ctx = lab(tmp_path, disable_rewards_normalization=True, reward_shaping="cosine")
    limit = ctx.config.rollout.rollout_max_response_len
    samples = [finished_sample(0, i, length) for i, length in enumerate([limit, 1, limit, 1])]
    for place, sample in enumerate(samples):
        sample.reward = float(place < 2)
    content = packed(ctx, [replace(group_rows(0), samples=samples), rows(1, 1, 1, 1, 1)])
    long_right, short_right, long_wrong, short_wrong = content.rewards[:4]
    assert short_wrong < long_wrong < 0 < long_right < short_right


HOOKS = """
def keep_short(args, groups):
    assert len(groups) == args.rollout_batch_size
    for group in groups:
        longest = max(group, key=lambda sample: sample.response_length)
        longest.remove_sample = True

def doubled(args, samples):
    raw = [sample.reward * 2 for sample in samples]
    return raw, [value - 1 for value in raw]

def odd(args, samples): return [1.0]
def short(args, samples): return [1.0], [1.0]
def wrong(args): return None
"""


def test_a_filter_over_the_batch_takes_samples_out_of_the_loss(tmp_path):
    (tmp_path / "h.py").write_text(HOOKS)
    path = f"{tmp_path / 'h.py'}:keep_short"
    ctx = lab(tmp_path, rollout_sample_filter_path=path)
    content = packed(ctx, [group_rows(0), group_rows(1)])
    lengths = [s.response_length for g in (0, 1) for s in group_rows(g).samples]
    longest = (int(np.argmax(lengths[:4])), 4 + int(np.argmax(lengths[4:])))
    assert content.removed == longest
    assert [content.denominators[row] for row in longest] == [0.0, 0.0]
    assert content.metrics["rollout/samples/removed"] == 2.0
    stored = read_batch(ctx.backend, 0)
    assert stored is not None and stored.content.removed == longest
    batch = load_train_batch(ctx.backend, stored)
    masks = np.split(batch.loss_mask, batch.response_offsets[1:-1])
    assert [bool(mask.any()) for mask in masks] == [row not in longest for row in range(8)]


def test_rewards_can_be_processed_by_a_function_over_the_batch(tmp_path):
    (tmp_path / "h.py").write_text(HOOKS)
    path = f"{tmp_path / 'h.py'}:doubled"
    content = packed(
        lab(tmp_path, custom_reward_post_process_path=path), [group_rows(0), group_rows(1)]
    )
    assert content.raw_rewards == [0.0, 2.0] * 4 and content.rewards == [-1.0, 1.0] * 4


@pytest.mark.parametrize(
    ("name", "message"),
    [("odd", "must return \\(raw_rewards, rewards\\)"), ("short", "two lists of 8 finite numbers"),
     ("wrong", "does not fit")],
)  # fmt: skip
def test_what_a_function_over_the_batch_returns_is_checked(tmp_path, name, message):
    (tmp_path / "h.py").write_text(HOOKS)
    path = f"{tmp_path / 'h.py'}:{name}"
    with pytest.raises(PluginError, match=message):
        packed(lab(tmp_path, custom_reward_post_process_path=path), [group_rows(0), group_rows(1)])
