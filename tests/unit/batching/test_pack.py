import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.batching.pack import pack, pack_sequence
from slime_core.errors import DataError


@given(
    rows=st.permutations(range(4)),
    count=st.integers(0, 4),
    pad_to=st.sampled_from([1, 8, 128]),
    positions=st.sampled_from(["trained", "response"]),
    responses=st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_packed_places_point_at_the_right_tokens(
    make_batch_module, rows, count, pad_to, positions, responses
):
    batch = make_batch_module([2, 1, 4, 3], responses)
    rows = rows[:count]
    packed = pack(batch, rows, pad_to=pad_to, positions=positions)
    assert len(packed.tokens) % pad_to == 0
    assert packed.row_ids == tuple(rows)
    expected = []
    for local, row in enumerate(rows):
        begin, end = packed.cu_seqlens[local], packed.cu_seqlens[local + 1]
        assert packed.tokens[begin:end].tolist() == batch.row_tokens(row).tolist()
        assert packed.position_ids[begin:end].tolist() == list(range(end - begin))
        length, response = int(batch.lengths[row]), int(batch.response_lengths[row])
        for j in range(response):
            flat = int(batch.response_offsets[row]) + j
            if positions == "response" or batch.loss_mask[flat]:
                position = length - response + j
                expected.append(
                    (begin + position - 1, batch.row_tokens(row)[position], local, flat)
                )
    found = zip(packed.logit_index, packed.targets, packed.rows, packed.response_index, strict=True)
    assert list(found) == expected


def test_padding_is_a_sequence_of_its_own(make_batch):
    packed = pack(make_batch([2, 1], [3, 2]), [0, 1], pad_to=16, pad_token=9)
    assert packed.cu_seqlens.tolist() == [0, 5, 8, 16]
    assert packed.tokens[8:].tolist() == [9] * 8
    assert packed.position_ids[8:].tolist() == list(range(8))
    assert packed.max_seqlen == 8
    assert packed.cu_seqlens.dtype == np.int32


def test_an_empty_micro_batch_is_padding_only(make_batch):
    packed = pack(make_batch([2], [3]), [], pad_to=4)
    assert packed.tokens.tolist() == [0, 0, 0, 0]
    assert packed.cu_seqlens.tolist() == [0, 4]
    assert packed.num_rows == len(packed.targets) == 0


def test_pad_to_must_be_positive(make_batch):
    with pytest.raises(DataError, match="pad_to"):
        pack(make_batch([2], [3]), [0], pad_to=0)


def test_rows_are_filled_up_one_by_one_where_they_will_be_cut(make_batch):
    packed = pack(make_batch([2, 1], [3, 2]), [0, 1], pad_to=8, row_multiple=4, pad_token=9)
    assert packed.cu_seqlens.tolist() == [0, 8, 12, 16]
    assert packed.tokens[5:8].tolist() == [9] * 3
    assert packed.position_ids.tolist() == [*range(8), *range(4), *range(4)]
    places = zip(packed.rows, packed.logit_index, packed.targets, strict=True)
    assert all(packed.tokens[index + 1] == target and index < (5, 11)[row]
               for row, index, target in places)  # fmt: skip


def test_a_sequence_by_itself_reads_all_but_its_first_token():
    packed = pack_sequence([5, 6, 7], pad_to=8, row_multiple=4)
    assert packed.tokens.tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert packed.cu_seqlens.tolist() == [0, 4, 8]
    assert packed.logit_index.tolist() == [0, 1] and packed.targets.tolist() == [6, 7]


def test_the_pack_is_a_multiple_of_what_its_rows_are(make_batch):
    with pytest.raises(DataError, match="multiple of row_multiple 4"):
        pack(make_batch([2], [3]), [0], pad_to=6, row_multiple=4)
