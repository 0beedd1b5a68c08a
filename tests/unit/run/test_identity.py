"""Which run a start means, and that a run never changes what it is."""

from pathlib import Path

import pytest

from slime_core.config.fields import identity_digest, numeric_digest, values
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError, StoreError
from slime_core.run.epoch import Lease
from slime_core.run.identity import INDEX, choose_run, list_runs, record_run
from slime_core.store import layout
from slime_core.store.backend import Backend, join_url, open_backend
from slime_core.store.documents import put_document, read_document
from tests.unit.config.trees import small


@pytest.fixture
def store(tmp_path: Path) -> Backend:
    return open_backend(str(tmp_path))


def at(store: Backend, run_id: str) -> Backend:
    return open_backend(join_url(store.url, run_id))


def record(store: Backend, run_id: str, config: RunConfig) -> None:
    record_run(store, at(store, run_id), config, run_id)


def ledgers(store: Backend, run_id: str, count: int) -> None:
    for k in range(count):
        put_document(at(store, run_id), layout.ledger(k), {"iteration": k})


def test_the_first_start_is_a_new_run_and_writes_nothing(store):
    choice = choose_run(store, small(run_name="my run!"))
    assert choice.run_id.startswith("my-run-2") and not choice.resumed
    assert choice.sentence == f"starting run {choice.run_id}"
    assert store.list() == []
    assert choose_run(store, small()).run_id != choice.run_id, "every new run has its own id"


def test_auto_takes_the_last_unfinished_run_of_the_same_identity(store):
    for run_id in ("first", "second", "third"):
        record(store, run_id, small())
    ledgers(store, "second", 1)
    ledgers(store, "third", 2)  # all of num_rollout
    record(store, "foreign", small(seed=99))
    choice = choose_run(store, small())
    assert (choice.run_id, choice.resumed) == ("second", True)
    assert choice.sentence == "resuming run second after 1 iteration (--new starts another)"


def test_a_start_that_failed_before_its_first_draw_is_no_progress(store):
    record(store, "a", small())
    for resume, rest in (("auto", " (--new starts another)"), ("a", "")):
        choice = choose_run(store, small(), resume)
        assert (choice.run_id, choice.resumed) == ("a", True)
        assert choice.sentence == (
            "starting run a, whose last start ended before its first iteration" + rest
        )
    at(store, "a").put_new(layout.draws(0), b"")
    assert "resuming run a after 0 iterations" in choose_run(store, small()).sentence


def test_runs_are_ordered_by_their_first_start(store):
    for run_id in ("b", "c", "a"):
        record(store, run_id, small())
    assert [run.body["run_id"] for run in list_runs(store)] == ["b", "c", "a"]


def test_a_damaged_entry_of_one_run_stops_no_other(store, caplog):
    record(store, "a", small())
    record(store, "b", small())
    path = store.local_path(f"{INDEX}b.json")
    assert path is not None
    path.write_bytes(b"{}")
    assert choose_run(store, small()).run_id == "a"
    assert "a run is left out" in caplog.text


def test_numeric_and_operational_values_may_differ_and_identity_may_not(store):
    record(store, "a", small())
    assert choose_run(store, small(lr=0.5, log_level="DEBUG", rollout_batch_size=8)).run_id == "a"
    for change in ({"seed": 2}, {"hf_checkpoint": "other"}, {"n_samples_per_prompt": 4}):
        assert not choose_run(store, small(**change)).resumed


def test_more_iterations_continue_a_finished_run(store):
    record(store, "a", small())
    ledgers(store, "a", 2)
    another = choose_run(store, small())
    assert not another.resumed
    said = f"the last run a is finished (all 2 iterations): starting run {another.run_id}"
    assert another.sentence == said
    assert choose_run(store, small(num_rollout=5)).run_id == "a"


def test_a_finished_run_that_is_to_be_longer_says_why_it_goes_on(store):
    record(store, "a", small())
    for k in range(2):
        body = {"iteration": k, "numeric": numeric_digest(small())}
        put_document(at(store, "a"), layout.ledger(k), body)
    sentence = "resuming run a after 2 iterations: it had finished, and num_rollout is 5 now"
    for resume, rest in (("auto", " (--new starts another)"), ("a", "")):
        choice = choose_run(store, small(num_rollout=5), resume)
        assert (choice.run_id, choice.finished) == ("a", False)
        assert choice.sentence == sentence + rest


def test_a_run_that_owes_an_evaluation_is_not_finished(store):
    config = small(eval_interval=5, eval_prompt_data=["held", "h.jsonl", "other", "o.jsonl"])
    record(store, "a", config)
    ledgers(store, "a", 2)
    put_document(at(store, "a"), layout.evaluation("l0-2", "held"), {"dataset": "held"})
    choice = choose_run(store, config)
    assert choice.run_id == "a" and "after 2 iterations, to evaluate other (" in choice.sentence
    put_document(at(store, "a"), layout.evaluation("l3.1-2", "other"), {"dataset": "other"})
    assert not choose_run(store, config).resumed


def test_a_run_without_a_trainer_counts_its_batches_and_is_no_other_run(store):
    alone = small(debug_rollout_only=True)
    assert identity_digest(alone) != identity_digest(small())
    assert "debug_rollout_only" not in values(small(), "identity"), "older runs are still found"
    record(store, "samples", alone)
    for k in range(2):
        put_document(at(store, "samples"), layout.batch(k), {"iteration": k})
    assert choose_run(store, small()).run_id != "samples"
    longer = choose_run(store, small(debug_rollout_only=True, num_rollout=3))
    assert (
        longer.run_id == "samples" and "had finished, and num_rollout is 3 now" in longer.sentence
    )
    assert choose_run(store, alone, "samples").finished
    record(store, "trained", small())
    put_document(at(store, "trained"), layout.batch(0), {"iteration": 0})
    assert "after 0 iterations" in choose_run(store, small(), "trained").sentence


def test_never_starts_another_run(store):
    record(store, "a", small())
    choice = choose_run(store, small(), "never")
    assert choice.run_id != "a" and not choice.resumed


def test_a_named_run_is_resumed_or_started_under_that_name(store):
    record(store, "a", small())
    ledgers(store, "a", 2)
    finished = choose_run(store, small(), "a")
    assert finished.sentence == "run a is finished (2 of 2 iterations)" and finished.finished
    assert choose_run(store, small(num_rollout=5), "a").sentence == (
        "resuming run a after 2 iterations"
    ), "with how many it had finished was not recorded"
    fresh = choose_run(store, small(), "exp-7.b")
    assert (fresh.run_id, fresh.resumed) == ("exp-7.b", False)


@pytest.mark.parametrize("name", ["", "../up", "a/b", "-x", ".hidden", "x" * 101, "ä"])
def test_a_name_that_is_no_folder_name_is_refused(store, name):
    with pytest.raises(ConfigError, match="use letters, digits"):
        choose_run(store, small(), name)


def test_another_identity_is_refused_and_every_changed_field_named(store):
    record(store, "a", small())
    other = small(seed=2, hf_checkpoint="n", lr=0.5)
    for refusing in (
        lambda: choose_run(store, other, "a"),
        lambda: record(store, "a", other),
    ):
        with pytest.raises(ConfigError) as error:
            refusing()
        message = str(error.value)
        assert "hf_checkpoint was 'm', now 'n'" in message and "seed was 1234, now 2" in message
        assert "lr was" not in message and "--new" in message
    record(store, "a", small(lr=0.5))


def test_a_first_start_that_was_cut_short_is_indexed_by_the_next(store):
    record(store, "a", small())
    store.delete(f"{INDEX}a.json")
    assert list_runs(store) == []
    record(store, "a", small())
    (run,) = list_runs(store)
    assert run.by["created"] == read_document(at(store, "a"), layout.RUN).by["created"]


def test_recording_a_run_again_changes_nothing(store):
    record(store, "a", small())
    before = {entry.key: store.get(entry.key) for entry in store.list()}
    record(store, "a", small())
    assert {entry.key: store.get(entry.key) for entry in store.list()} == before


def test_of_two_starts_at_one_run_one_wins_and_the_other_hears_who_has_it(store):
    record(store, "a", small())
    first = choose_run(store, small())
    second = choose_run(store, small())
    assert first.run_id == second.run_id == "a"
    with (
        Lease.acquire(at(store, "a"), ttl_s=5),
        pytest.raises(StoreError, match=r"belongs to process \d+ on .*which was alive .* s ago"),
    ):
        Lease.acquire(at(store, "a"), ttl_s=5)
