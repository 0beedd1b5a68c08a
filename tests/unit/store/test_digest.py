import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_core.sample import Sample, Span
from slime_core.store.codec import samples_to_rows
from slime_core.store.digest import checksum, group_digests, rows_digest
from tests.unit.store.builders import finished_sample
from tests.unit.store.strategies import samples


def one_batch(table: pa.Table) -> pa.RecordBatch:
    return table.combine_chunks().to_batches()[0]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(samples(), min_size=1, max_size=3), samples(), samples())
def test_digest_survives_every_way_of_storing(group, before, after):
    digest = rows_digest(samples_to_rows(group))
    within = samples_to_rows([before, *group, after]).slice(1, len(group))
    assert rows_digest(within) == digest
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, within.schema, options=options) as writer:
        writer.write_batch(within)
    table = pa.ipc.open_file(sink.getvalue()).read_all()
    assert rows_digest(one_batch(table)) == digest
    file = io.BytesIO()
    pq.write_table(table, file)
    assert rows_digest(one_batch(pq.read_table(io.BytesIO(file.getvalue())))) == digest
    wider = table.append_column("later", pa.nulls(len(group), pa.float64()))
    assert rows_digest(one_batch(wider)) == digest


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(samples(), min_size=1, max_size=2), min_size=1, max_size=3))
def test_groups_together_have_the_digests_they_have_alone(groups):
    together = samples_to_rows([sample for group in groups for sample in group])
    alone = [rows_digest(samples_to_rows(group)) for group in groups]
    assert group_digests(together, [len(group) for group in groups]) == alone


def changed(**fields: object) -> Sample:
    sample = finished_sample(1, length=2)
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": [7, 8, 1, 0, 1]}, {"response": "answer"}, {"label": None}, {"label": ""},
        {"reward": 0.5}, {"reward": float("nan")}, {"loss_mask": [1, 0]}, {"loss_mask": None},
        {"rollout_log_probs": [-0.5, -0.5]}, {"spans": [Span(0, 2, "a-1")]}, {"attempt": 1},
        {"metadata": {}}, {"remove_sample": True}, {"weight_versions": []},
        {"rollout_routed_experts": np.zeros((4, 1, 1), np.int32)}, {"unknown": 1},
    ],
)  # fmt: skip
def test_digest_sees_every_change(fields):
    same, other = samples_to_rows([changed()]), samples_to_rows([changed(**fields)])
    assert rows_digest(same) == rows_digest(samples_to_rows([finished_sample(1, length=2)]))
    assert rows_digest(same) != rows_digest(other)


def test_digest_sees_where_one_value_ends():
    def digest(*labels: str) -> str:
        return rows_digest(samples_to_rows([Sample(label=label) for label in labels]))

    assert len({digest("ab", ""), digest("a", "b"), digest("", "ab"), digest("ba", "")}) == 4


def test_what_was_only_measured_does_not_count():
    timed = changed(non_generation_time=3.0, session_id="x")
    timed.prefix_cache_info.cached_tokens = 5
    assert rows_digest(samples_to_rows([timed])) == rows_digest(samples_to_rows([changed()]))


def test_known_checksum():
    assert checksum(b"") == "99aa06d3014798d86001c324468d497f"  # XXH3_128bits of nothing
    assert checksum(pa.py_buffer(b"abc")) == checksum(b"abc")
