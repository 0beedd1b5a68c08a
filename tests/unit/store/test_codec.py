import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.sample import FIELD_NAMES, PrefixCacheInfo, Sample, Span, SpecInfo, Status
from slime_core.store.codec import decode_samples, samples_to_rows
from slime_core.store.schema import PART_SCHEMA, SAMPLE_COLUMNS, SAMPLE_SCHEMA
from tests.unit.store.strategies import same_sample, samples

GOLDEN = Path(__file__).parent / "golden"


def through_ipc(rows: pa.RecordBatch) -> pa.Table:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return pa.ipc.open_file(sink.getvalue()).read_all()


def through_parquet(rows: pa.RecordBatch) -> pa.Table:
    file = io.BytesIO()
    pq.write_table(pa.table(rows), file)
    return pq.read_table(io.BytesIO(file.getvalue()))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(samples(), min_size=1, max_size=3))
def test_samples_come_back_as_they_were(given_samples):
    rows = samples_to_rows(given_samples)
    rows.validate(full=True)
    for again in (decode_samples(rows), decode_samples(through_ipc(rows))):
        assert all(map(same_sample, given_samples, again))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(samples(), min_size=1, max_size=2))
def test_samples_come_back_through_parquet(given_samples):
    again = decode_samples(through_parquet(samples_to_rows(given_samples)))
    assert all(map(same_sample, given_samples, again))


def test_every_field_has_a_place():
    names = {column.name for column in SAMPLE_COLUMNS} | {"spec_info", "prefix_cache_info"}
    assert FIELD_NAMES - names == set()


def test_no_list_ends_at_32_bit_offsets():
    for field in PART_SCHEMA:
        assert not pa.types.is_list(field.type), field.name
        assert field.type not in (pa.utf8(), pa.binary()), field.name


def test_null_nan_and_absent_stay_apart():
    rows = samples_to_rows(
        [
            Sample(reward=float("nan"), rollout_log_probs=[float("nan")], response_length=1),
            Sample(reward=None, rollout_log_probs=None),
            Sample(reward={}, rollout_log_probs=[]),
        ]
    )
    assert rows.column("reward").is_valid().to_pylist() == [True, False, False]
    nan, none, empty = decode_samples(rows)
    assert np.isnan(nan.reward) and np.isnan(nan.rollout_log_probs[0])
    assert none.reward is None and none.rollout_log_probs is None
    assert empty.reward == {} and empty.rollout_log_probs == []


@pytest.mark.parametrize(
    "mask", [[True, False], [1.0, 0.0], (1, 0), np.array([1, 0]), np.array([True, False])]
)
def test_numbers_of_other_types_are_kept_as_numbers(mask):
    rows = samples_to_rows([Sample(tokens=[1, 2], response_length=2, loss_mask=mask)])
    assert rows.column("loss_mask").to_pylist() == [[1, 0]]


@pytest.mark.parametrize(
    "broken",
    [
        {"loss_mask": [0.5]},
        {"loss_mask": [300]},
        {"tokens": [2**31]},
        {"tokens": ["a"]},
        {"tokens": [[1]]},
        {"rollout_log_probs": [None]},
        {"teacher_log_probs": "ab"},
        {"rollout_routed_experts": [[1], [1, 2]]},
        {"status": "unheard"},
        {"metadata": {"x": object()}},
    ],
)
def test_what_a_column_cannot_hold_is_named(broken):
    with pytest.raises(DataError, match=f"{next(iter(broken))}.*sample 5 of group 2"):
        samples_to_rows([Sample(), Sample(group_index=2, index=5, **broken)])


def test_odd_values_of_plain_fields_survive_beside_their_column():
    odd = Sample(label=7, response=None, index="x", prompt="\ud800", reward=2**60 + 1)  # pyright: ignore
    rows = samples_to_rows([odd, Sample(label="7")])
    assert rows.column("label").to_pylist() == [None, "7"]
    assert same_sample(decode_samples(rows)[0], odd)


@pytest.mark.parametrize("reward", [1, 2**60 + 1, 10**400, True, np.float32(0.1)])
def test_rewards_keep_their_value(reward):
    assert decode_samples(samples_to_rows([Sample(reward=reward)]))[0].reward == reward


def test_log_probs_are_float32():
    rows = samples_to_rows([Sample(tokens=[1], response_length=1, rollout_log_probs=[-0.1])])
    assert decode_samples(rows)[0].rollout_log_probs == [float(np.float32(-0.1))]


def test_experts_take_the_smallest_type():
    for top, width in ((255, 1), (256, 2), (65_536, 8)):
        experts = np.full((3, 2, 2), top, np.int32)
        rows = samples_to_rows([Sample(tokens=[1] * 4, rollout_routed_experts=experts)])
        assert len(rows.column("rollout_routed_experts")[0].as_py()) == 12 * width
        again = decode_samples(rows)[0].rollout_routed_experts
        assert again.dtype == np.int32 and np.array_equal(again, experts)


def test_columns_of_other_versions():
    rows = samples_to_rows([Sample(label="a", metadata={"x": 1}, tokens=[1])])
    older = rows.drop_columns(["metadata", "tokens", "spans", "status", "session_id"])
    sample = decode_samples(older)[0]
    assert sample.label == "a" and sample.metadata == {} and sample.tokens == []
    assert sample.status is Status.PENDING
    newer = pa.table(rows).append_column("entropy", pa.array([0.5]))
    assert decode_samples(newer)[0].entropy == 0.5  # pyright: ignore[reportAttributeAccessIssue]


def golden_samples() -> list[Sample]:
    full = Sample(
        group_index=3, index=25, rollout_id=9, attempt=1,
        prompt=[{"role": "user", "content": "sort 4821\u2028🙂"}], tokens=[1, 2, 3, 4],
        multimodal_inputs={"images": [b"\x89PNG"]},
        multimodal_train_inputs={"pixels": np.array([[0.5, 1.0]], np.float32)},
        multimodal_train_input_id="image-1", apply_chat_template_kwargs={"enable_thinking": False},
        response="ab", response_length=2, label="1248", reward={"math": 1.0, "form": float("nan")},
        loss_mask=[1, 0], weight_versions=["a-0", "a-1"],
        spans=[Span(0, 1, "a-0"), Span(1, 1, "", False)], rollout_log_probs=[-0.25, 0.0],
        rollout_top_p_token_ids=[5, 6], rollout_top_p_token_offsets=[0, 2, 2],
        rollout_routed_experts=np.arange(12, dtype=np.int32).reshape(3, 2, 2),
        teacher_log_probs=[-0.5, -1.0], remove_sample=True, status=Status.ABORTED,
        metadata={"a": [1, None, "é"], "t": (1, 2), "n": np.int64(7)},
        generate_function_path="mine.generate", custom_rm_path="mine.reward",
        train_metadata={"step": 1}, session_id="s", non_generation_time=0.5,
        spec_info=SpecInfo(1, 2, 3, 4), prefix_cache_info=PrefixCacheInfo(5, 6),
    )  # fmt: skip
    full.trace = {"turns": [1, 2]}  # pyright: ignore[reportAttributeAccessIssue]
    return [full, Sample(prompt="p", reward=0.5), Sample()]


def test_files_of_schema_v1_stay_readable():
    """The file was written once by version 1 of the schema. Never write it again."""
    table = pa.ipc.open_file(GOLDEN / "samples-v1.arrow").read_all()
    assert table.schema.equals(SAMPLE_SCHEMA)
    assert all(map(same_sample, golden_samples(), decode_samples(table)))
    listing = json.loads((GOLDEN / "schema-v1.json").read_text(encoding="utf-8"))
    assert listing == {field.name: str(field.type) for field in PART_SCHEMA}
