import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from slime_core.errors import DataError
from slime_core.sample import FIELD_NAMES, PrefixCacheInfo, Sample, Span, SpecInfo, Status

VECTORS = Path(__file__).parents[1] / "vectors" / "edge_cases.jsonl"
STOP = {"finish_reason": {"type": "stop", "matched": 2}, "weight_version": "a-3"}


def vector(name: str) -> dict:
    rows = [json.loads(line) for line in VECTORS.read_bytes().split(b"\n") if line]
    return next(row for row in rows if row["kind"] == "sample" and row["fn"] == name)


def started(**more) -> Sample:
    return Sample(group_index=2, index=17, tokens=[1, 2, 3], **more)


def test_status_values_are_those_of_slime():
    assert [status.value for status in Status] == vector("status_values")["expected"]


def test_unknown_fields_survive_as_attributes():
    row = vector("roundtrip_unknown_field")
    metadata = row["expected"]["metadata"]
    data = Sample(status=Status.TRUNCATED, metadata=metadata).to_dict() | row["input"]["extra"]
    assert data["status"] == row["expected"]["status"]
    sample = Sample.from_dict(json.loads(json.dumps(data)))
    assert sample.unknown_field == row["expected"]["unknown"]  # pyright: ignore
    assert sample.metadata == metadata and sample.status is Status.TRUNCATED
    assert sample.to_dict() == data


def test_every_field_has_a_default_and_samples_share_nothing():
    one, other = Sample(prompt="p"), Sample(prompt="p")
    assert one == other
    for name in FIELD_NAMES:
        value = getattr(one, name)
        if isinstance(value, (list, dict, SpecInfo, PrefixCacheInfo)):
            assert value is not getattr(other, name), name


def test_nested_records_come_back_as_records():
    sample = started(spans=[Span(0, 2, "a-1")], spec_info=SpecInfo(1, 2, 3, 4))
    again = Sample.from_dict(sample.to_dict())
    assert again == sample and again.spans == [Span(0, 2, "a-1")]


def test_reward_value_needs_the_key_that_fits():
    assert Sample(reward=0.5).get_reward_value(SimpleNamespace(reward_key=None)) == 0.5
    many = Sample(reward={"math": 1.0, "form": 0.0})
    assert many.get_reward_value(SimpleNamespace(reward_key="form")) == 0.0
    with pytest.raises(DataError, match=r"'style'.*math"):
        many.get_reward_value(SimpleNamespace(reward_key="style"))
    with pytest.raises(DataError, match="--reward-key"):
        many.get_reward_value(SimpleNamespace())
    with pytest.raises(DataError, match="--reward-key math"):
        Sample(reward=0.5).get_reward_value(SimpleNamespace(reward_key="math"))


def test_effective_length_counts_the_mask():
    assert Sample(response_length=5).effective_response_length == 5
    assert Sample(response_length=5, loss_mask=[1, 0, 0, 1, 0]).effective_response_length == 2
    assert Sample(response_length=2, loss_mask=[0, 0]).effective_response_length == 0


def test_append_of_model_and_tool_tokens():
    sample = started()
    sample.append_response_tokens(tokens=[4, 5], log_probs=[-1.0, -2.0], text="ab", meta_info=STOP)
    sample.append_response_tokens(tokens=[6], log_probs=None, trainable=False, text="<tool>")
    later = {"finish_reason": {"type": "length"}, "weight_version": "a-4"}
    sample.append_response_tokens(tokens=[7], log_probs=[-0.5], text="c", meta_info=later)
    assert sample.tokens == [1, 2, 3, 4, 5, 6, 7] and sample.response == "ab<tool>c"
    assert sample.response_length == 4 and sample.prompt_length == 3
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-1.0, -2.0, 0.0, -0.5]
    assert sample.weight_versions == ["a-3", "a-4"] and sample.status is Status.TRUNCATED
    assert sample.spans == [Span(0, 2, "a-3"), Span(2, 1, "", False), Span(3, 1, "a-4")]


def test_pieces_of_one_version_are_one_span():
    sample = started()
    for _ in range(3):
        sample.append_response_tokens(tokens=[4], log_probs=[-1.0], weight_version="a-0")
    assert sample.spans == [Span(0, 3, "a-0")]


def test_span_version_may_differ_from_the_one_at_the_end():
    sample = started()
    sample.append_response_tokens(
        tokens=[4], log_probs=[-1.0], meta_info=STOP, weight_version="a-2"
    )
    assert sample.spans == [Span(0, 1, "a-2")] and sample.weight_versions == ["a-3"]


@pytest.mark.parametrize(
    ("finish", "status"),
    [("stop", Status.COMPLETED), ("length", Status.TRUNCATED), ("abort", Status.ABORTED)],
)
def test_status_follows_the_finish_reason(finish, status):
    sample = started()
    sample.append_response_tokens(
        tokens=[4], log_probs=[-1.0], meta_info={"finish_reason": {"type": finish}}
    )
    assert sample.status is status


def test_terminal_info_waits_for_a_finish_reason():
    sample = started()
    running = {"finish_reason": None, "weight_version": "a-1", "completion_tokens": 1}
    sample.append_response_tokens(tokens=[4], log_probs=[-1.0], meta_info=running)
    assert sample.status is Status.PENDING and sample.weight_versions == []
    assert sample.spec_info == SpecInfo() and sample.spans == [Span(0, 1, "a-1")]
    sample.append_response_tokens(
        tokens=[4], log_probs=[-1.0], meta_info=STOP, update_terminal_info=False
    )
    assert sample.status is Status.PENDING


def test_counters_add_up_over_requests():
    sample = started()
    meta = STOP | {
        "completion_tokens": 6, "spec_verify_ct": 2, "spec_num_correct_drafts": 3,
        "spec_num_proposed_drafts": 4, "cached_tokens": 5, "prompt_tokens": 10,
    }  # fmt: skip
    for _ in range(2):
        sample.append_response_tokens(tokens=[4], log_probs=[-1.0], meta_info=meta)
    assert sample.spec_info == SpecInfo(6, 8, 4, 12)
    assert sample.spec_info.spec_accept_rate == 0.75
    assert sample.spec_info.spec_accept_length == 3.0
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.5
    assert SpecInfo().spec_accept_rate == SpecInfo().spec_accept_length == 0.0
    assert PrefixCacheInfo().prefix_cache_hit_rate == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [4, 5], "log_probs": [-1.0]}, "1 log_probs for 2 tokens"),
        ({"tokens": [4], "log_probs": None}, "need log_probs"),
        ({"tokens": [4], "log_probs": [-1.0], "trainable": False}, "take no log_probs"),
        (
            {"tokens": [4], "log_probs": [-1.0], "meta_info": {"finish_reason": {"type": "x"}}},
            "unknown finish reason",
        ),
    ],
)
def test_wrong_appends_are_refused(arguments, message):
    with pytest.raises(DataError, match=f"sample 17 of group 2.*{message}"):
        started().append_response_tokens(**arguments)


def test_a_refused_append_changes_nothing():
    sample = started()
    sample.append_response_tokens(tokens=[4], log_probs=[-1.0])
    before = sample.to_dict()
    with pytest.raises(DataError, match="offsets"):
        sample.append_response_tokens(
            tokens=[5],
            log_probs=[-1.0],
            meta_info={"top_p_token_ids": [1, 2], "top_p_token_offsets": [0, 1, 2]},
        )
    assert sample.to_dict() == before


def test_tokens_set_by_hand_are_filled_in_before_a_tool_answer():
    sample = Sample(tokens=[1, 2, 3], response_length=2, weight_versions=["a-1"])
    sample.append_response_tokens(tokens=[9], log_probs=None, trainable=False)
    assert sample.loss_mask == [1, 1, 0] and sample.rollout_log_probs == [0.0, 0.0, 0.0]
    assert sample.spans == [Span(0, 2, "a-1"), Span(2, 1, "", False)]


def test_trainable_tokens_cannot_follow_ones_without_log_probs():
    sample = Sample(tokens=[1, 2, 3], response_length=2)
    with pytest.raises(DataError, match="first 2 response tokens have no log_probs"):
        sample.append_response_tokens(tokens=[4], log_probs=[-1.0])


def test_nucleus_of_tool_tokens_is_empty():
    args = SimpleNamespace(rollout_top_p=0.9)
    meta = {"top_p_kept_token_ids": [4, 9, 5], "top_p_kept_token_offsets": [0, 2, 3]}
    sample = started()
    sample.append_response_tokens(args, tokens=[4, 5], log_probs=[-1.0, -1.0], meta_info=meta)
    sample.append_response_tokens(args, tokens=[6, 6], log_probs=None, trainable=False)
    sample.append_response_tokens(
        args, tokens=[7], log_probs=[-1.0],
        meta_info={"top_p_token_ids": [7], "top_p_token_offsets": [0, 1]},
    )  # fmt: skip
    assert sample.rollout_top_p_token_ids == [4, 9, 5, 7]
    assert sample.rollout_top_p_token_offsets == [0, 2, 3, 3, 3, 4]


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        (None, None, "needs the kept ids"),
        ([4], [0, 1, 1], "3 top-p offsets for 1 tokens"),
        ([4], None, "0 top-p offsets"),
        ([4], [0, 2], "not from 0 to 1"),
        ([4], [1, 1], "not from 0 to 1"),
    ],
)
def test_wrong_nucleus_is_refused(ids, offsets, message):
    args = SimpleNamespace(rollout_top_p=0.9)
    meta = {"top_p_token_ids": ids, "top_p_token_offsets": offsets}
    with pytest.raises(DataError, match=message):
        started().append_response_tokens(args, tokens=[4], log_probs=[-1.0], meta_info=meta)


def test_routed_experts_are_continued():
    args = SimpleNamespace(num_layers=2, moe_router_topk=3)
    sample = started()
    first = np.arange(4 * 2 * 3, dtype=np.int32)  # 5 tokens -> 4 rows
    sample.append_response_tokens(
        args, tokens=[4, 5], log_probs=[-1.0, -1.0], meta_info={"routed_experts": first.tobytes()}
    )
    assert sample.rollout_routed_experts.shape == (4, 2, 3)
    more = {"routed_experts": np.full(2 * 6, 7, np.int32), "routed_experts_start_len": 3}
    sample.append_response_tokens(args, tokens=[6], log_probs=[-1.0], meta_info=more)
    expected = np.concatenate([first.reshape(4, 2, 3)[:3], np.full((2, 2, 3), 7)])
    np.testing.assert_array_equal(sample.rollout_routed_experts, expected)
    with pytest.raises(DataError, match="are not 6 rows x 2 layers x top 3"):
        sample.append_response_tokens(
            args, tokens=[6], log_probs=[-1.0], meta_info={"routed_experts": first}
        )


@pytest.mark.parametrize(
    "broken",
    [
        {"response_length": 4},
        {"response_length": 2, "loss_mask": [1]},
        {"response_length": 2, "rollout_log_probs": [0.0]},
        {"response_length": 2, "teacher_log_probs": [0.0]},
        {"response_length": 2, "rollout_top_p_token_offsets": [0, 1]},
        {"response_length": 2, "spans": [Span(0, 1)]},
    ],
)
def test_lengths_are_checked(broken):
    with pytest.raises(DataError, match="sample 17 of group 2"):
        started(**broken).check_lengths()
