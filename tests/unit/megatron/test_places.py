"""Where the tokens of a rank's share of a pack stand in the batch."""

from __future__ import annotations

import numpy as np
import pytest

from slime_core.batching.context_parallel import share_of_pack
from slime_core.batching.pack import pack
from slime_core.batching.types import TrainBatch, offsets_of
from slime_core.megatron.places import places_of

ROWS = (4, 0, 3)


def batch_of(lengths: list[int]) -> TrainBatch:
    """Rows of one response token each; every token of the batch is another one."""
    n = len(lengths)
    return TrainBatch(
        tokens=np.arange(1, sum(lengths) + 1, dtype=np.int32),
        token_offsets=offsets_of(lengths),
        response_lengths=np.ones(n, dtype=np.int64),
        loss_mask=np.ones(n, dtype=np.uint8),
        rollout_log_probs=np.zeros(n, dtype=np.float32),
        response_offsets=offsets_of([1] * n),
        rewards=np.zeros(n),
        raw_rewards=np.zeros(n),
        group_ids=np.arange(n),
        rollout_ids=np.arange(n),
        denominators=np.ones(n),
        steps=(tuple(range(n)),),
        truncated=np.zeros(n, dtype=np.uint8),
    )


@pytest.mark.parametrize("sequence", [1, 2])
@pytest.mark.parametrize("context", [1, 2, 3])
@pytest.mark.parametrize("rows", [ROWS, ()])
def test_each_token_has_one_rank_and_the_ranks_hold_their_tokens(
    rows: tuple[int, ...], context: int, sequence: int
) -> None:
    batch = batch_of([5, 9, 2, 13, 6])
    multiple = 2 * context if context > 1 else 1
    packed = pack(batch, rows, pad_to=multiple * sequence, row_multiple=multiple)
    found = []
    for rank in range(context):
        tokens = packed.tokens if context == 1 else share_of_pack(packed, context, rank).tokens
        for part, own in enumerate(np.split(tokens, sequence)):
            places = places_of(packed, batch, (context, rank), (sequence, part))
            real = places >= 0
            assert (batch.tokens[places[real]] == own[real]).all()
            assert not own[~real].any(), "padding"
            found += places[real].tolist()
    wanted = [
        place
        for row in rows
        for place in range(batch.token_offsets[row], batch.token_offsets[row + 1])
    ]
    assert sorted(found) == sorted(wanted)
