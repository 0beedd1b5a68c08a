import numpy as np
import pyarrow as pa
import pytest

from slime_core.errors import DataError
from slime_core.sample import Sample
from slime_core.store.backend import open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.columnar import SampleBatch
from slime_core.store.parts import open_part
from tests.unit.store.builders import finished_sample, group_rows, write_groups


def address_within(array: np.ndarray, buffer: pa.Buffer) -> bool:
    start = array.__array_interface__["data"][0]
    return buffer.address <= start and start + array.nbytes <= buffer.address + buffer.size


def test_columns_are_views_of_the_mapped_file(tmp_path):
    backend = open_backend(str(tmp_path))
    part = write_groups(backend, 0, [group_rows(0), group_rows(1)])
    file = open_part(NodeCache(backend), part.key)
    for batch in (0, 1):
        rows = file.rows(batch)
        for column in (rows.tokens, rows.loss_mask, rows.rollout_log_probs):
            assert column.values.size and not column.values.flags.writeable
            assert address_within(column.values, file.data)


def test_ragged_columns_know_their_rows():
    samples = [finished_sample(g) for g in range(4)]
    batch = SampleBatch.from_samples(samples)
    assert len(batch) == 4
    for i, sample in enumerate(samples):
        assert batch.tokens.row(i).tolist() == sample.tokens
        assert batch.loss_mask.row(i).tolist() == sample.loss_mask
        assert batch.rollout_log_probs.row(i).tolist() == sample.rollout_log_probs
    assert batch.tokens.values.dtype == np.int32
    assert batch.loss_mask.values.dtype == np.uint8
    assert batch.rollout_log_probs.values.dtype == np.float32
    assert batch.tokens.lengths.tolist() == [len(sample.tokens) for sample in samples]


def test_slices_and_chunks_give_the_same_columns():
    samples = [finished_sample(g) for g in range(5)]
    whole = SampleBatch.from_samples(samples)
    sliced = SampleBatch(whole.rows.slice(2, 2))
    assert sliced.tokens.offsets[0] == 0
    assert [sliced.tokens.row(i).tolist() for i in range(2)] == [s.tokens for s in samples[2:4]]
    pieces = pa.Table.from_batches([whole.rows.slice(0, 2), whole.rows.slice(2, 3)])
    chunked = SampleBatch(pieces)
    np.testing.assert_array_equal(chunked.tokens.values, whole.tokens.values)
    np.testing.assert_array_equal(chunked.tokens.offsets, whole.tokens.offsets)
    assert chunked.to_samples() == samples


def test_null_rows_are_told_from_empty_ones():
    batch = SampleBatch.from_samples([Sample(loss_mask=[]), Sample(), finished_sample(1)])
    assert batch.loss_mask.valid.tolist() == [True, False, True]
    assert batch.loss_mask.lengths.tolist() == [0, 0, 2]


def test_numbers_and_texts():
    batch = SampleBatch.from_samples([Sample(reward=0.5, label="a"), Sample(label=None)])
    assert batch.numbers("response_length").tolist() == [0, 0]
    assert batch.numbers("remove_sample").tolist() == [False, False]
    assert batch.texts("label") == ["a", None] and batch.valid("reward").tolist() == [True, False]
    with pytest.raises(DataError, match="1 of 2 rows have no reward"):
        batch.numbers("reward")
    with pytest.raises(DataError, match="no column entropy"):
        batch.numbers("entropy")
    with pytest.raises(DataError, match="label is no column of lists"):
        batch.ragged("label")


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_tokens_reach_torch_without_a_copy():
    torch = pytest.importorskip("torch")
    tokens = SampleBatch.from_samples([finished_sample(0)]).tokens.values
    tensor = torch.frombuffer(memoryview(tokens), dtype=torch.int32)
    assert tensor.data_ptr() == tokens.__array_interface__["data"][0]
    assert tensor.tolist() == tokens.tolist()
