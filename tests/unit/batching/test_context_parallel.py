import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.batching.context_parallel import locate, share_of_pack, zigzag_ranges
from slime_core.batching.pack import pack, pack_sequence
from slime_core.errors import ConfigError, DataError


@given(total=st.integers(1, 200), cp=st.integers(1, 8), data=st.data())
def test_every_position_and_response_token_is_owned_exactly_once(total, cp, data):
    response = data.draw(st.integers(0, total - 1))
    shares = [zigzag_ranges(total, response, cp, rank) for rank in range(cp)]
    positions = [p for s in shares for part in s.chunks for p in range(*part)]
    assert sorted(positions) == list(range(2 * cp * shares[0].chunk))
    tokens = [p for s in shares for part in s.tokens for p in range(*part)]
    assert sorted(tokens) == list(range(total - response, total))
    for share in shares:
        for chunk, logits in zip(share.chunks, share.logits, strict=True):
            assert all(chunk[0] <= p < chunk[1] for p in range(*logits))


def test_ranks_and_lengths_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="rank 2 does not exist among 2"):
        zigzag_ranges(4, 1, 2, 2)
    with pytest.raises(DataError, match="at least one"):
        zigzag_ranges(4, 4, 1, 0)


@given(
    cp=st.integers(1, 4),
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=5),
    tail=st.integers(1, 3),
)
def test_the_shares_of_a_pack_hold_every_token_and_every_read_position_once(
    make_batch_module, cp, rows, tail
):
    batch = make_batch_module([p for p, _ in rows], [r for _, r in rows])
    multiple = 2 * cp
    packed = pack(batch, range(len(rows)), pad_to=multiple * tail, row_multiple=multiple)
    shares = [share_of_pack(packed, cp, rank) for rank in range(cp)]
    assert {len(share.tokens) for share in shares} == {len(packed.tokens) // cp}
    both = [np.sort(np.concatenate([getattr(s, name) for s in shares]))
            for name in ("tokens", "position_ids", "own")]  # fmt: skip
    wanted = [packed.tokens, packed.position_ids, np.arange(len(packed.targets))]
    assert all(np.array_equal(a, np.sort(b)) for a, b in zip(both, wanted, strict=True))
    # Each rank's values one after another, in the order of the pack again: here the token that
    # predicts.
    gathered = np.zeros(cp * shares[0].most, dtype=np.int64)
    for rank, share in enumerate(shares):
        start = rank * share.most
        gathered[start : start + len(share.own)] = share.tokens[share.index]
    assert gathered[shares[0].order].tolist() == packed.tokens[packed.logit_index].tolist()


@pytest.mark.parametrize("total", [1, 2, 3, 16, 17, 61])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_a_share_holds_the_chunks_of_its_rank(total, cp):
    packed = pack_sequence(range(total), pad_to=2 * cp, row_multiple=2 * cp)
    for rank in range(cp):
        held = share_of_pack(packed, cp, rank).position_ids.tolist()
        chunks = zigzag_ranges(total, 0, cp, rank).chunks
        assert held == [position for chunk in chunks for position in range(*chunk)]


def test_rows_that_cannot_be_cut_are_refused():
    with pytest.raises(DataError, match="multiples of 4"):
        locate(np.arange(3), np.array([0, 3]), 2)
