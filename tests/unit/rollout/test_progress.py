"""A segment is decided by which groups ended how, never by which ended first."""

import itertools

import pytest

from slime_core.rollout.progress import Progress

K, D, S = "kept", "dropped", "spare"


def ended(verdicts: dict[int, str | None], target: int, **options: bool) -> Progress:
    progress = Progress(target, **options)
    progress.begin(verdicts)
    for group_id, verdict in verdicts.items():
        if verdict is not None:
            progress.end(group_id, verdict)
    return progress


@pytest.mark.parametrize(
    ("verdicts", "last"),
    [
        ({0: K, 1: K}, 1),
        ({0: K, 1: K, 2: K, 3: None}, 1),
        ({0: None, 1: K, 2: K, 3: K}, None),
        ({0: D, 1: K, 2: None, 3: K}, None),
        ({0: D, 1: K, 2: D, 3: K}, 3),
        ({0: K, 1: "failed"}, None),
        ({0: K, 1: "aborted"}, None),
        ({0: K, 1: D}, None),
        ({0: S, 1: K}, 1),
        ({0: S, 1: S}, 1),
        ({0: S, 1: K, 2: K}, 2),
        ({0: S, 1: K, 2: None}, None),
    ],
)
def test_the_first_groups_by_id_are_the_segment(verdicts, last):
    assert ended(verdicts, 2).last == last


def test_first_come_takes_any_and_leaves_the_rest_open():
    progress = ended({0: None, 1: K, 2: None, 3: K}, 2, first_come=True)
    assert progress.decided and progress.sealed() == {1, 3}
    assert not ended({0: None, 1: K, 2: S, 3: None}, 2, first_come=True).decided


@pytest.mark.parametrize(
    ("verdicts", "missing"),
    [
        ({0: None, 1: None}, 0),
        ({0: D, 1: None}, 1),
        ({0: D, 1: D, 2: None}, 1),
        ({0: S, 1: D, 2: None}, 0),
        ({0: D, 1: D, 2: D}, 2),
    ],
)
def test_what_may_still_be_kept_counts_until_it_is_dropped(verdicts, missing):
    assert ended(verdicts, 2).missing == missing


def test_no_order_of_ending_changes_what_is_drawn_or_sealed():
    truth = {0: K, 1: D, 2: S, 3: D, 4: D, 5: K, 6: K, 7: D, 8: K, 9: K}
    wave, target, results = 2, 4, set()
    for order in itertools.islice(itertools.permutations(range(8)), 0, 40320, 37):
        rank = {group: place for place, group in enumerate(order)} | {8: 8, 9: 9}
        progress = Progress(target)
        begun = set(range(5))
        progress.begin(begun)
        ended_ids: set[int] = set()
        while not progress.decided:
            if progress.missing:
                new = set(range(len(begun), len(begun) + wave))
                begun |= new
                progress.begin(new)
                continue
            next_one = min(begun - ended_ids, key=rank.__getitem__)
            ended_ids.add(next_one)
            progress.end(next_one, truth[next_one])
        results.add((len(begun), progress.last))
    assert len(results) == 1
