import pytest

from slime_core.errors import DataError, DigestError
from slime_core.store import layout
from slime_core.store.backend import MemoryBackend
from slime_core.store.cache import NodeCache
from slime_core.store.draws import Draw, list_draws, log_draws, read_draws
from tests.unit.store.builders import draw, prompt_sample


@pytest.fixture
def backend():
    return MemoryBackend()


def test_draws_come_back_with_their_samples_and_states(backend):
    draws = [draw(4, segment=2), draw(5, segment=2)]
    assert log_draws(backend, 0, draws) is None
    assert read_draws(NodeCache(backend), 0) == draws
    ids = read_draws(NodeCache(backend), 0, samples=False)
    assert [(d.group_id, d.position, d.source_state) for d in ids] == [
        (4, 4, {"next": 5}),
        (5, 5, {"next": 6}),
    ]
    assert all(not d.samples for d in ids)


def test_who_loses_a_number_gets_the_winners_draws(backend):
    assert log_draws(backend, 0, [draw(0), draw(1)]) is None
    assert log_draws(backend, 0, [draw(0)]) == [draw(0), draw(1)]
    assert log_draws(backend, 1, [draw(2)]) is None
    assert list_draws(backend) == [0, 1]


def test_a_source_may_have_no_state(backend):
    log_draws(backend, 0, [Draw(0, 0, 0, 0, [prompt_sample(0)])])
    assert read_draws(NodeCache(backend), 0)[0].source_state is None


def test_a_gap_in_the_log_is_named(backend):
    for seq in (0, 2):
        log_draws(backend, seq, [draw(seq)])
    with pytest.raises(DigestError, match=r"draws/000001\.arrow is missing"):
        list_draws(backend)


def test_every_flipped_byte_is_found(backend):
    key = layout.draws(0)
    log_draws(backend, 0, [draw(0)])
    data = backend.get(key)
    for place in range(0, len(data), 29):
        backend.delete(key)
        backend.put_new(key, data[:place] + bytes([data[place] ^ 0x01]) + data[place + 1 :])
        with pytest.raises(DigestError, match=f"{key} is damaged"):
            read_draws(NodeCache(backend), 0)


def test_prompts_that_look_like_a_checksum_stay_as_they_are(backend):
    sample = prompt_sample(0)
    sample.prompt = '"checksum":"' + "0" * 32
    log_draws(backend, 0, [Draw(0, 0, 0, 0, [sample])])
    assert read_draws(NodeCache(backend), 0)[0].samples == [sample]


@pytest.mark.parametrize("length", [0, 100, -1])
def test_truncated_draws_are_found(backend, length):
    log_draws(backend, 0, [draw(0)])
    data = backend.get(layout.draws(0))
    backend.delete(layout.draws(0))
    backend.put_new(layout.draws(0), data[:length])
    with pytest.raises(DigestError, match=r"draws/000000\.arrow is damaged"):
        read_draws(NodeCache(backend), 0)


def test_wrong_draws_are_refused(backend):
    for draws, message in (
        ([], "no draws"),
        ([Draw(1, 0, 1, 0, [])], "draw 1 has no samples"),
        ([Draw(1, 0, 1, 0, [prompt_sample(2)])], "sample 8 of group 2 is logged for draw 1"),
    ):
        with pytest.raises(DataError, match=message):
            log_draws(backend, 0, draws)
    assert backend.list() == []
