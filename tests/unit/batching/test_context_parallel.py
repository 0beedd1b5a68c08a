import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.batching.context_parallel import zigzag_ranges
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
