"""Garbage collection takes what nothing needs and nothing else, wherever it is cut off."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_core.errors import DigestError
from slime_core.run.audit import audit
from slime_core.run.history import read_history
from slime_core.run.plan import INITIAL, plan
from slime_core.run.retention import (
    SAFE_CHECKPOINTS,
    Retention,
    collect,
    find_garbage,
    settled_segments,
)
from slime_core.store import layout
from slime_core.store.cache import NodeCache
from slime_core.store.compaction import compact_segment
from slime_core.store.load import load_groups
from slime_core.store.seal import list_dropped, list_seals
from slime_core.store.verify import verify_run
from tests.unit.run.simulation import (
    DATASET_ROWS,
    START,
    Killed,
    Life,
    MortalBackend,
    run_with_deaths,
)
from tests.unit.store.builders import FakeOwner, group_rows, write_groups

ITERATIONS = 8
NUMBER = st.none() | st.integers(1, 4)


@pytest.fixture(scope="module")
def untouched():
    return run_with_deaths(ITERATIONS, [])[1]


def partly_run(deaths) -> MortalBackend:
    """A run that died as often as told and was not started again."""
    backend = MortalBackend()
    for epoch, (dies_at, after) in enumerate(deaths):
        backend.restart(dies_at, after)
        try:
            Life(backend, FakeOwner(epoch), ITERATIONS).live()
        except Killed:
            continue
    backend.restart(None, False)
    return backend


def collected(backend, retention, dies_at, compacts) -> None:
    """One collection and compaction that dies at its n-th change of the store, if that comes."""
    left = [dies_at]

    def mortal(call):
        def change(*arguments):
            left[0] -= 1
            if left[0] < 0:
                raise Killed(str(arguments[0]))
            return call(*arguments)

        return change

    plain = MortalBackend.put_new, MortalBackend.delete
    backend.put_new = mortal(lambda *a: plain[0](backend, *a))
    backend.delete = mortal(lambda *a: plain[1](backend, *a))
    try:
        cache = NodeCache(backend)
        collect(backend, FakeOwner(50), find_garbage(cache, retention))
        if compacts:
            for segment in set(list_seals(backend)) - list_dropped(backend):
                compact_segment(cache, segment)
    except Killed:
        pass
    finally:
        del backend.put_new, backend.delete


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    deaths=st.lists(st.tuples(st.integers(5, 90), st.booleans()), min_size=1, max_size=2),
    retentions=st.lists(
        st.tuples(st.builds(Retention, NUMBER, NUMBER), st.integers(0, 60), st.booleans()),
        min_size=1,
        max_size=3,
    ),
)
def test_a_run_goes_on_as_if_nothing_had_been_collected(
    untouched, tmp_path_factory, deaths, retentions
):
    backend = partly_run(deaths)
    for retention, dies_at, compacts in retentions:
        collected(backend, retention, dies_at, compacts)
        cache = NodeCache(backend)
        assert verify_run(cache, START, rows=True) == []
        history = read_history(cache, START)
        steps = plan(history, ITERATIONS)
        safe = [*(c.iteration for c in steps.checkpoints), INITIAL, INITIAL][SAFE_CHECKPOINTS - 1]
        for k, batch in history.batches.items():
            if k > safe:
                load_groups(cache, batch.content)
    end = Life(backend, FakeOwner(90), ITERATIONS).live()
    assert end.state == untouched.state
    assert verify_run(NodeCache(backend), START) == []
    folder = tmp_path_factory.mktemp("run")
    backend.dump(folder)
    found = audit(folder, DATASET_ROWS)
    assert found.sound, found.problems
    assert found.iterations == ITERATIONS


def test_segments_that_no_resume_needs(untouched):
    backend, _ = run_with_deaths(ITERATIONS, [])
    cache = NodeCache(backend)
    settled = settled_segments(cache)
    checkpoints = plan(read_history(cache, START), ITERATIONS).checkpoints
    assert max(settled) <= checkpoints[1].iteration, "a resume may need what came after it"
    assert settled and settled_segments(cache, keep_last=3) == [s for s in settled if s <= 4]
    collect(backend, FakeOwner(), find_garbage(cache, Retention(every=4)))
    assert set(settled_segments(cache)) == {0, 4} & set(settled), "the others have no rows"


def test_keeping_the_last_and_every_third(untouched):
    backend, _ = run_with_deaths(ITERATIONS, [])
    garbage = find_garbage(NodeCache(backend), Retention(last=2, every=3))
    assert garbage.segments == (1, 2, 4, 5), "6 and 7 are the last, 0 and 3 are multiples"
    assert all(layout.parse_part(entry.key) for entry in garbage.objects)
    assert garbage.size_bytes > 1000
    collect(backend, FakeOwner(), garbage)
    cache = NodeCache(backend)
    batch = read_history(cache, START).batches[1]
    with pytest.raises(DigestError, match="groups/000001 were dropped, as its retention asked"):
        load_groups(cache, batch.content)
    load_groups(cache, read_history(cache, START).batches[3].content)
    again = find_garbage(cache, Retention(last=2, every=3))
    assert (again.segments, again.objects) == ((), ())


def test_rows_that_a_resume_may_need_stay_whatever_is_asked(untouched):
    backend, _ = run_with_deaths(ITERATIONS, [])
    garbage = find_garbage(NodeCache(backend), Retention(last=1))
    assert garbage.segments == (0, 1, 2, 3, 4, 5), "the checkpoint before the newest has 5"
    backend.delete(layout.manifest(7, 0))
    assert find_garbage(NodeCache(backend), Retention(last=1)).segments == (0, 1, 2, 3)
    for k in (5, 3):
        backend.delete(layout.manifest(k, 0))
    assert find_garbage(NodeCache(backend), Retention(last=1)).segments == ()


def test_what_no_seal_names_goes_and_open_segments_stay(untouched):
    backend, _ = run_with_deaths(3, [])
    double = write_groups(backend, 1, [group_rows(2)], epoch=7).key
    opened = write_groups(backend, 3, [group_rows(9)], epoch=7).key
    backend.put_new("epochs/probe-1", b"")
    backend.put_new("quarantine/groups/x", b"damaged")
    cache = NodeCache(backend)
    assert [e.key for e in find_garbage(cache, Retention()).objects] == ["epochs/probe-1", double]
    with_quarantine = find_garbage(cache, Retention(), quarantined=True).objects
    assert "quarantine/groups/x" in [entry.key for entry in with_quarantine]
    assert opened not in [entry.key for entry in with_quarantine]
