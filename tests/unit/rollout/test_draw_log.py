"""Draws are logged before anything uses them, and nobody takes a prompt twice or skips one."""

import json
import threading
from pathlib import Path

import pytest

from slime_core.data.sources import PromptSource, SourceSettings
from slime_core.errors import DataError, DigestError, StoreError
from slime_core.rollout.draw_log import DrawLog
from slime_core.sample import Sample
from slime_core.store.backend import Backend, open_backend
from slime_core.store.draws import Draw

ROWS = 7
SAMPLES = 2


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return open_backend(str(tmp_path / "store"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"prompt {i}"}) + "\n" for i in range(ROWS)))
    return str(path)


def tokens_of(sample: Sample) -> None:
    sample.tokens = [len(str(sample.prompt))]


def log_of(backend: Backend, prompts: str, shuffle: bool = True) -> DrawLog:
    """As a new owner opens it."""
    settings = SourceSettings(n_samples_per_prompt=SAMPLES, rollout_shuffle=shuffle)
    log = DrawLog(backend, PromptSource(prompts, settings), tokens_of)
    log.refresh()
    return log


def ids(draws: list[Draw]) -> list[tuple[int, int, int]]:
    return [(draw.group_id, draw.data_epoch, draw.position) for draw in draws]


def flat(draws: list[list[Draw]]) -> list[Draw]:
    return [draw for some in draws for draw in some]


def expected(first: int, count: int) -> list[tuple[int, int, int]]:
    return [(group, *divmod(group, ROWS)) for group in range(first, first + count)]


def test_draws_are_numbered_over_the_run_and_wrap_around_the_data(backend, prompts):
    log = log_of(backend, prompts)
    first, second = log.draw(0, 5), log.draw(1, 5)
    assert ids(first) == expected(0, 5) and ids(second) == expected(5, 5)
    in_first_pass = [str(draw.samples[0].prompt) for draw in first + second[:2]]
    assert sorted(in_first_pass) == [f"prompt {i}" for i in range(ROWS)]
    assert [sample.index for sample in second[0].samples] == [10, 11]


def test_what_is_drawn_has_its_tokens_in_the_log(backend, prompts):
    drawn = log_of(backend, prompts).draw(0, 2)
    logged = log_of(backend, prompts).of_segment(0)
    assert [draw.samples for draw in logged] == [draw.samples for draw in drawn]
    assert all(sample.tokens == [8] for draw in logged for sample in draw.samples)


def test_a_new_owner_goes_on_where_the_log_ends(backend, prompts):
    """Also in the middle of a pass over shuffled data."""
    at_once = log_of(open_backend(backend.url + "-other"), prompts)
    want = [at_once.draw(segment, 4) for segment in range(4)]
    got = [log_of(backend, prompts).draw(segment, 4) for segment in range(4)]
    assert ids(flat(got)) == ids(flat(want)) == expected(0, 16)
    assert [draw.samples for draw in flat(got)] == [draw.samples for draw in flat(want)]


def test_a_segment_has_its_first_draws_and_those_drawn_further(backend, prompts):
    log = log_of(backend, prompts)
    log.draw(0, 2)
    log.draw(1, 2)
    log.draw(1, 1)
    log.draw(2, 2)
    assert ids(log.of_segment(1)) == expected(2, 3)
    assert log.files_of(1) == [1, 2]
    assert log.of_segment(3) == [] and log.files_of(3) == []


def test_another_owners_draws_for_the_segment_count_as_logged(backend, prompts):
    """An old owner that is not dead yet logs the same number first."""
    ours, theirs = log_of(backend, prompts), log_of(backend, prompts)
    assert ids(theirs.draw(0, 3)) == expected(0, 3)
    assert ids(ours.draw(0, 3)) == expected(0, 3), "taken over, not drawn beside"
    assert ids(ours.draw(1, 2)) == expected(3, 2)


def test_only_what_is_missing_is_drawn_beyond_another_owners(backend, prompts):
    ours, theirs = log_of(backend, prompts), log_of(backend, prompts)
    theirs.draw(0, 2)
    assert ids(ours.draw(0, 5)) == expected(0, 5)
    assert ids(log_of(backend, prompts).of_segment(0)) == expected(0, 5)


def test_another_owners_draws_for_another_segment_only_move_the_source_on(backend, prompts):
    ours, theirs = log_of(backend, prompts), log_of(backend, prompts)
    theirs.draw(4, 3)
    assert ids(ours.draw(0, 2)) == expected(3, 2)


def test_owners_that_race_never_take_a_prompt_twice(backend, prompts):
    rounds, owners, failures = 12, 3, []
    logs = [log_of(backend, prompts) for _ in range(owners)]
    barrier = threading.Barrier(owners)

    def own(log: DrawLog, owner: int) -> None:
        try:
            for number in range(rounds):
                barrier.wait(10.0)
                log.draw(owner * rounds + number, 2)  # a segment of its own: nothing is shared
        except BaseException as error:  # a thread's error must fail the test
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=own, args=(log, i)) for i, log in enumerate(logs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not failures
    reader = log_of(backend, prompts)
    drawn = [reader.of_segment(segment) for segment in range(owners * rounds)]
    assert all(len(draws) == 2 for draws in drawn)
    assert sorted(ids(flat(drawn))) == expected(0, 2 * owners * rounds)


def test_what_could_not_be_logged_is_drawn_again(backend, prompts, monkeypatch):
    log = log_of(backend, prompts)
    log.draw(0, 2)
    with monkeypatch.context() as patch:
        patch.setattr("slime_core.rollout.draw_log.log_draws", raising(StoreError("no space left")))
        with pytest.raises(StoreError):
            log.draw(1, 2)
    assert ids(log.draw(1, 2)) == expected(2, 2)


def raising(error: Exception):
    def function(*_: object) -> None:
        raise error

    return function


def test_changed_prompts_are_refused_where_the_log_goes_on(backend, prompts):
    log_of(backend, prompts).draw(0, 2)
    path = Path(prompts)
    path.write_text(path.read_text().replace("prompt 3", "prompt x"))
    with pytest.raises(DataError, match="are not those of the saved run"):
        log_of(backend, prompts)


def test_a_gap_in_the_log_is_named(backend, prompts):
    log = log_of(backend, prompts)
    log.draw(0, 2)
    log.draw(1, 2)
    backend.delete("draws/000000.arrow")
    with pytest.raises(DigestError, match=r"draws/000000\.arrow is missing"):
        log_of(backend, prompts)
