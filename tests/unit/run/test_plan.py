import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_core.errors import DigestError
from slime_core.run.audit import audit
from slime_core.run.history import read_history
from slime_core.run.plan import Action, History, next_untrained, plan
from slime_core.store import layout
from slime_core.store.cache import NodeCache
from slime_core.store.ledger import initial_state
from tests.unit.run.simulation import DATASET_ROWS, GROUPS, START, MortalBackend, run_with_deaths

ITERATIONS = 5
DEATHS = st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=6)


@pytest.fixture(scope="module")
def undisturbed():
    return run_with_deaths(ITERATIONS, [])


def history_of(backend, keep=lambda key: True) -> History:
    """The history of a copy that holds only some objects."""
    copy = MortalBackend()
    for entry in backend.list():
        if keep(entry.key):
            copy.put_new(entry.key, backend.get(entry.key))
    return read_history(NodeCache(copy), START)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DEATHS)
def test_any_deaths_end_in_the_run_that_was_never_disturbed(undisturbed, deaths):
    """Same batches, same order, each exactly once, wherever and however often it dies."""
    _, expected = undisturbed
    backend, last = run_with_deaths(ITERATIONS, deaths)
    assert last.states == expected.states and last.action is Action.FINISHED
    assert last.frontier == expected.frontier
    with tempfile.TemporaryDirectory() as folder:
        backend.dump(Path(folder))
        found = audit(Path(folder), DATASET_ROWS)
    assert found.problems == [] and found.final_state == last.state
    assert found.trained == ITERATIONS * GROUPS
    assert found.draws == found.trained + found.dropped + found.unused + found.open


def written_order(backend: MortalBackend) -> list[str]:
    return list(backend._objects)


@pytest.mark.parametrize("cut", range(0, 50, 3))
def test_every_prefix_of_a_history_has_a_plan(undisturbed, cut):
    backend, _ = undisturbed
    keys = set(written_order(backend)[:cut])
    history = history_of(backend, keys.__contains__)
    now = plan(history, ITERATIONS)
    assert now.last == len(history.ledgers) - 1 == now.iteration - 1
    expected = Action.OPEN
    if any(draw.segment == now.iteration for draws in history.draws for draw in draws):
        expected = Action.ADOPT
    if now.iteration in history.unsealed:
        expected = Action.ADOPT
    if layout.seal(now.iteration) in keys:
        expected = Action.PACK
    if layout.batch(now.iteration) in keys:
        expected = Action.TRAIN
    if now.iteration == ITERATIONS:
        expected = Action.FINISHED
    assert now.action is expected
    assert now.publish == (now.last >= 0 and layout.sync(now.last) not in keys)


def test_an_empty_store_opens_the_first_segment():
    now = plan(History(START), 3)
    assert (now.last, now.state, now.iteration, now.action) == (-1, START, 0, Action.OPEN)
    assert not now.publish and list(now.replay(None)) == [] and now.to_generate == []
    assert plan(History(START), 0).action is Action.FINISHED


def test_the_newest_checkpoint_on_the_chain_comes_first(undisturbed):
    backend, _ = undisturbed
    history = history_of(backend)
    now = plan(history, ITERATIONS)
    assert [c.iteration for c in now.checkpoints] == [3, 1]
    assert list(now.replay(now.checkpoints[0])) == [4]
    assert list(now.replay(now.checkpoints[1])) == [2, 3, 4]
    assert list(now.replay(None)) == [0, 1, 2, 3, 4]


def test_checkpoints_of_another_chain_or_of_the_future_are_left_out(undisturbed):
    backend, _ = undisturbed
    history = history_of(backend, lambda key: key != layout.ledger(4))
    good = history.checkpoints[0]
    foreign = replace(good, state="0" * 64)
    future = replace(good, iteration=4)
    now = plan(replace(history, checkpoints=[future, foreign, good]), ITERATIONS)
    assert now.checkpoints == (good,)


def test_a_living_trainer_is_kept_only_at_the_state_of_the_chain(undisturbed):
    backend, finished = undisturbed
    history = history_of(backend)
    assert plan(history, 9, finished.state).trainer_kept
    assert list(plan(history, 9, finished.state).replay(None)) == []
    for other in (None, finished.states[-2], START):
        assert not plan(history, 9, other).trainer_kept


def test_gaps_and_foreign_weights_stop_with_the_files_name(undisturbed):
    backend, _ = undisturbed
    for missing in (layout.ledger(2), layout.batch(2)):
        with pytest.raises(DigestError, match=f"{missing} is missing"):
            plan(history_of(backend, lambda key, missing=missing: key != missing), ITERATIONS)
    with pytest.raises(DigestError, match=r"000000/ledger\.json does not follow"):
        plan(replace(history_of(backend), start=initial_state("other")), ITERATIONS)


def test_open_groups_are_served_first_with_the_attempt_the_log_leaves(undisturbed):
    backend, _ = undisturbed
    for cut, key in enumerate(written_order(backend)):
        if layout.parse_part(key) is None:
            continue
        keys = set(written_order(backend)[: cut + 1])
        history = history_of(backend, keys.__contains__)
        now = plan(history, ITERATIONS)
        rows: dict[int, list[tuple[int, bool]]] = {}
        for segment in [
            *(s.as_segment() for s in history.seals.values()),
            *history.unsealed.values(),
        ]:
            for group in segment.groups:
                entry = group.entry
                rows.setdefault(entry.group_id, []).append((entry.attempt, entry.complete))
        drawn = [draw.group_id for draws in history.draws for draw in draws]
        expected = [
            (group, max((attempt for attempt, _ in rows.get(group, [])), default=-1) + 1)
            for group in drawn
            if not any(complete for _, complete in rows.get(group, []))
        ]
        assert [(s.group_id, s.next_attempt) for s in now.to_generate] == expected


def test_without_a_trainer_the_first_iteration_without_a_batch_is_next(undisturbed):
    backend, _ = undisturbed
    whole = history_of(backend)
    assert next_untrained(whole) == ITERATIONS and next_untrained(History(START)) == 0
    begun = replace(whole, batches={k: whole.batches[k] for k in (0, 1)})
    assert next_untrained(begun) == 2
    with pytest.raises(DigestError, match="iteration 1 has no batch, but iteration 2 has"):
        next_untrained(replace(whole, batches={k: whole.batches[k] for k in (0, 2)}))
