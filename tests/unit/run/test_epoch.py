import os
import threading
import time
from dataclasses import asdict, replace

import pytest

from slime_core.errors import StaleOwnerError, StoreError, UnavailableError
from slime_core.run.epoch import Lease, newest_epoch, refuse_living_owner, store_now_s
from slime_core.run.process import own_identity
from slime_core.store import layout
from slime_core.store.backend import MemoryBackend, open_backend
from slime_core.store.documents import put_document, read_document
from slime_core.waits import poll


@pytest.fixture(params=["file", "memory"])
def backend(request, tmp_path):
    return MemoryBackend() if request.param == "memory" else open_backend(str(tmp_path))


def foreign_epoch(backend, epoch: int = 0, ttl_s: float = 20.0, **who) -> None:
    """An owner on a machine of which nothing can be known."""
    identity = replace(own_identity(), host="elsewhere", boot_id="x", pid=4711, **who)
    body = {**asdict(identity), "ttl_s": ttl_s, "config": "", "token": "t"}
    put_document(backend, layout.epoch(epoch), body)


def test_the_first_owner_is_epoch_0_and_says_who_it_is(backend):
    with Lease.acquire(backend, ttl_s=5, config_digest="c") as lease:
        assert lease.epoch == 0
        lease.guard()
        body = read_document(backend, layout.epoch(0)).body
        assert body["pid"] == os.getpid() and body["config"] == "c" and body["ttl_s"] == 5
    assert newest_epoch(backend).ended


def test_a_clean_end_leaves_no_marks_and_needs_no_wait(backend):
    first = Lease.acquire(backend, ttl_s=0.2)
    poll(
        "a mark", 10, lambda: [e for e in backend.list(layout.EPOCHS) if ".alive-" in e.key] or None
    )
    first.release()
    first.release()
    assert [e.key for e in backend.list(layout.EPOCHS)] == [layout.ended(0), layout.epoch(0)]
    began = time.monotonic()
    with Lease.acquire(backend, ttl_s=60) as second:
        assert second.epoch == 1 and time.monotonic() - began < 30
    with pytest.raises(StaleOwnerError, match="was released"):
        second.guard()


def test_an_owner_that_lives_is_not_disturbed(backend):
    with Lease.acquire(backend) as lease:
        message = rf"process {os.getpid()} on .*alive \d+\.\d s ago; .*--take-over"
        with pytest.raises(StoreError, match=message):
            Lease.acquire(backend)
        lease.guard()


def test_a_run_in_use_on_this_machine_is_refused_before_anything_starts(backend):
    refuse_living_owner(backend)
    message = rf"belongs to process {os.getpid()} on"
    with Lease.acquire(backend), pytest.raises(StoreError, match=message):
        refuse_living_owner(backend)
    refuse_living_owner(backend)
    foreign_epoch(backend, 1)
    refuse_living_owner(backend)  # nothing is known about it: the lease waits for it instead


def test_take_over_makes_the_old_owner_stop(backend):
    old = Lease.acquire(backend)
    with Lease.acquire(backend, take_over=True) as new:
        assert new.epoch == 1
        new.guard()
        with pytest.raises(StaleOwnerError, match=f"process {os.getpid()} .*epoch 1.* must stop"):
            old.guard()
        old.release()
        new.guard()
        assert newest_epoch(backend) == replace(newest_epoch(backend), epoch=1, ended=False)


def test_a_process_that_is_gone_is_followed_at_once(backend):
    gone = replace(own_identity(), start_ticks=1)
    body = {**asdict(gone), "ttl_s": 600.0, "config": "", "token": "t"}
    put_document(backend, layout.epoch(4), body)
    began = time.monotonic()
    with Lease.acquire(backend) as lease:
        assert lease.epoch == 5 and time.monotonic() - began < 60


def test_a_silent_owner_is_followed_after_its_ttl(backend):
    foreign_epoch(backend, ttl_s=0.5)
    written = newest_epoch(backend).last_sign_s
    with Lease.acquire(backend, ttl_s=60) as lease:
        assert lease.epoch == 1
        taken = next(e for e in backend.list(layout.epoch(1))).modified_s
        assert taken - written >= 0.45


def test_an_owner_elsewhere_that_shows_life_is_not_disturbed(backend):
    foreign_epoch(backend, ttl_s=30)
    stop = threading.Event()

    def beat() -> None:
        count = 0
        while not stop.wait(0.05):
            backend.put_new(layout.alive(0, count), b"")
            count += 1

    owner = threading.Thread(target=beat)
    owner.start()
    try:
        with pytest.raises(StoreError, match="process 4711 on elsewhere"):
            Lease.acquire(backend, ttl_s=60)
    finally:
        stop.set()
        owner.join()
    assert newest_epoch(backend).epoch == 0


def test_a_clean_end_elsewhere_ends_the_wait(backend):
    foreign_epoch(backend, ttl_s=30)
    timer = threading.Timer(0.2, put_document, (backend, layout.ended(0), {"epoch": 0}))
    timer.start()
    with Lease.acquire(backend) as lease:
        assert lease.epoch == 1
    timer.join()


def test_marks_are_renewed_and_never_pile_up(backend):
    with Lease.acquire(backend, ttl_s=0.2):
        signs = set()

        def fresh() -> bool | None:
            marks = [e.key for e in backend.list(layout.EPOCHS) if ".alive-" in e.key]
            assert len(marks) <= 2
            signs.update(marks)
            return len(signs) >= 3 or None

        poll("three marks", 20, fresh, 0.01)


def test_the_newest_owner_is_the_one_with_a_document(backend):
    assert newest_epoch(backend) is None
    backend.put_new(layout.alive(7, 0), b"")
    assert newest_epoch(backend) is None
    foreign_epoch(backend, 3)
    backend.put_new(layout.ended(2), b"")
    state = newest_epoch(backend)
    assert (state.epoch, state.ended) == (3, False)
    backend.put_new(layout.alive(3, 0), b"")
    assert newest_epoch(backend).last_sign_s >= state.last_sign_s


def test_ages_are_in_the_stores_time():
    class Behind(MemoryBackend):
        """A store whose clock is an hour late."""

        def list(self, prefix=""):
            return [replace(e, modified_s=e.modified_s - 3600) for e in super().list(prefix)]

    backend = Behind()
    assert abs(store_now_s(backend) - (time.time() - 3600)) < 10
    assert backend.list() == []
    foreign_epoch(backend, ttl_s=0.3)
    with Lease.acquire(backend) as lease:
        assert lease.epoch == 1


def test_a_store_that_lost_its_epochs_stops_the_owner(backend):
    lease = Lease.acquire(backend)
    backend.delete(layout.epoch(0))
    with pytest.raises(StoreError, match="has gone"):
        lease.guard()
    lease.release()


def test_a_mark_whose_answer_was_lost_does_not_stop_the_beats():
    class Forgetful(MemoryBackend):
        """Writes the second mark, but its answer never comes."""

        def __init__(self) -> None:
            super().__init__()
            self.written: list[str] = []

        def put_new(self, key, data):
            super().put_new(key, data)
            self.written.append(key)
            if key == layout.alive(0, 1):
                raise UnavailableError("no answer")

    backend = Forgetful()
    with Lease.acquire(backend, ttl_s=0.2):
        poll("later marks", 20, lambda: layout.alive(0, 3) in backend.written or None, 0.01)
    assert [e.key for e in backend.list(layout.EPOCHS)] == [layout.ended(0), layout.epoch(0)]


class Silent(MemoryBackend):
    """The signs of the first owner are an hour old."""

    def list(self, prefix=""):
        return [
            replace(e, modified_s=e.modified_s - 3600) if e.key == layout.epoch(0) else e
            for e in super().list(prefix)
        ]


def test_a_silent_owner_that_is_seen_to_live_keeps_its_run():
    backend = Silent()
    body = {**asdict(own_identity()), "ttl_s": 20.0, "config": "", "token": "t"}
    put_document(backend, layout.epoch(0), body)
    message = rf"process {os.getpid()} on .*alive 36\d\d\.\d s ago; .*--take-over if it is hung"
    with pytest.raises(StoreError, match=message):
        refuse_living_owner(backend)
    with pytest.raises(StoreError, match=message):
        Lease.acquire(backend)
    with Lease.acquire(backend, take_over=True) as lease:
        assert lease.epoch == 1


def test_a_silent_owner_that_nobody_sees_is_followed_at_once():
    backend = Silent()
    foreign_epoch(backend, ttl_s=600)
    refuse_living_owner(backend)
    with Lease.acquire(backend) as lease:
        assert lease.epoch == 1
