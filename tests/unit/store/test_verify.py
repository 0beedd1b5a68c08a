import pytest

from slime_core.store import layout, parts
from slime_core.store.backend import open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.ledger import initial_state
from slime_core.store.verify import verify_run
from tests.unit.store.builders import run_iteration

START = initial_state("weights")


@pytest.fixture
def backend(tmp_path):
    backend = open_backend(str(tmp_path))
    state, seal = START, ""
    for k in range(2):
        state, seal = run_iteration(backend, k, state, seal)
    return backend


def damage(backend, key: str) -> None:
    data = backend.get(key)
    backend.delete(key)
    backend.put_new(key, data[:40] + bytes([data[40] ^ 1]) + data[41:])


def test_a_sound_run_has_no_problems(backend):
    assert verify_run(NodeCache(backend), START) == []


def test_every_object_is_reported_once(backend):
    seen = []
    verify_run(NodeCache(backend), START, on_object=lambda entry: seen.append(entry.key))
    assert seen == [entry.key for entry in backend.list()]


def test_rows_that_are_not_what_was_signed_are_found(tmp_path, monkeypatch):
    backend = open_backend(str(tmp_path / "other"))
    with monkeypatch.context() as patch:
        patch.setattr(parts, "group_digests", lambda rows, counts: ["0" * 64] * len(counts))
        run_iteration(backend, 0, START, "")
    assert verify_run(NodeCache(backend), START) == []
    problems = verify_run(NodeCache(backend), START, rows=True)
    assert any("does not hold the rows of group 0" in text for text in problems)


def test_every_damaged_object_is_named(backend):
    for entry in backend.list():
        data = backend.get(entry.key)
        damage(backend, entry.key)
        problems = verify_run(NodeCache(backend), START)
        assert any(entry.key in text for text in problems), entry.key
        backend.delete(entry.key)
        backend.put_new(entry.key, data)
    assert verify_run(NodeCache(backend), START) == []


def test_a_missing_part_and_another_start_are_named(backend):
    part = next(e.key for e in backend.list() if layout.parse_part(e.key))
    backend.delete(part)
    assert any(f"{part} is gone or damaged" in text for text in verify_run(NodeCache(backend)))
    other = verify_run(NodeCache(backend), initial_state("other"))
    assert any("ledger.json does not follow" in text for text in other)
