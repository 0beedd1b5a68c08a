"""Four processes want the same key, a thousand times: exactly one gets it, whole."""

import multiprocessing
from pathlib import Path

from slime_core.errors import LostRaceError
from slime_core.store.backend import open_backend

PROCESSES, ROUNDS = 4, 1_000


def contend(root: str, me: int, barrier, wins) -> None:
    """Meets the others before each round, so that every round is contested."""
    backend = open_backend(root)
    won = []
    for round_ in range(ROUNDS):
        barrier.wait(60)
        try:
            backend.put_new(f"round/{round_:06d}", bytes([me]) * (1 + round_))
            won.append(round_)
        except LostRaceError:
            continue
    wins.put((me, won))


def test_each_round_has_exactly_one_winner(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    barrier, wins = context.Barrier(PROCESSES), context.Queue()
    workers = [
        context.Process(target=contend, args=(str(tmp_path), me, barrier, wins))
        for me in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    won = dict(wins.get(timeout=300) for _ in workers)
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sorted(round_ for rounds in won.values() for round_ in rounds) == list(range(ROUNDS))
    assert sum(bool(rounds) for rounds in won.values()) > 1, "the rounds were not contested"
    backend = open_backend(str(tmp_path))
    for me, rounds in won.items():
        for round_ in rounds:
            assert backend.get(f"round/{round_:06d}") == bytes([me]) * (1 + round_)
    assert len(backend.list()) == ROUNDS
