"""The lease on a run: one owner at a time, without clocks that agree and without compare-and-swap.

Owners are numbered. An owner creates `epochs/<E>.json` (create-only, so one wins), shows that it is
alive by ever new marks, and looks before each decision whether a higher number exists. Ages are
differences of the store's own times.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from slime_core.errors import AwayError, DeadlineError, LostRaceError, StaleOwnerError, StoreError
from slime_core.run.process import ProcessIdentity, own_identity
from slime_core.store import layout
from slime_core.store.backend import Backend, Entry
from slime_core.store.documents import put_document, read_document
from slime_core.store.probe import check_create_only
from slime_core.waits import Deadline, beside, within

log = logging.getLogger(__name__)
BEATS_PER_TTL = 4


@dataclass(frozen=True)
class EpochState:
    """What the store says about the newest owner.

    Attributes:
        epoch: its number.
        ended: it came to a clean end.
        last_sign_s: when it last showed that it is alive, in the store's time.
    """

    epoch: int
    ended: bool
    last_sign_s: float


def newest_epoch(backend: Backend) -> EpochState | None:
    """The newest owner, None where there never was one."""
    return _newest(backend.list(layout.EPOCHS))


def _newest(entries: Iterable[Entry]) -> EpochState | None:
    signs: dict[int, dict[str, float]] = {}
    for entry in entries:
        parsed = layout.parse_epoch(entry.key)
        if parsed is not None:
            epoch, kind = parsed
            of_kind = signs.setdefault(epoch, {})
            of_kind[kind] = max(entry.modified_s, of_kind.get(kind, 0.0))
    owned = [epoch for epoch, kinds in signs.items() if "owner" in kinds]
    if not owned:
        return None
    kinds = signs[max(owned)]
    last = max(kinds["owner"], kinds.get("alive", 0.0))
    return EpochState(max(owned), "ended" in kinds, last)


def store_now_s(backend: Backend) -> float:
    """The store's own time: that of an object written for the purpose."""
    key = f"{layout.EPOCHS}probe-{uuid.uuid4().hex}"
    backend.put_new(key, b"")
    try:
        entries = backend.list(key)
        if not entries:
            raise StoreError(f"{backend.url} does not list {key}, which was just written")
        return entries[0].modified_s
    finally:
        backend.delete(key)


class Lease:
    """Ownership of a run, as epoch `epoch`. Made by `acquire`, given back by `release`."""

    def __init__(self, backend: Backend, epoch: int, ttl_s: float) -> None:
        self.epoch = epoch
        self.ttl_s = ttl_s
        self._backend = backend
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._beats = 0
        self._thread = threading.Thread(
            target=self._refresh, name=f"alive mark of epoch {epoch}", daemon=True
        )

    @classmethod
    def acquire(
        cls,
        backend: Backend,
        *,
        ttl_s: float = 20.0,
        config_digest: str = "",
        take_over: bool = False,
    ) -> Lease:
        """Becomes the owner of a run, waiting for a silent one up to its TTL.

        Args:
            backend: the run's store.
            ttl_s: how long this owner may be silent before another one may take the run.
            config_digest: recorded with the epoch.
            take_over: do not ask whether the present owner is alive. It stops at its next decision.

        Raises:
            StoreError: the run has an owner that is alive (names its host, pid and age), or the
                store lets two writers create one object.
        """
        check_create_only(backend)
        newest = newest_epoch(backend)
        if newest is not None and not newest.ended:
            _wait_until_free(backend, newest, take_over)
        epoch = 0 if newest is None else newest.epoch + 1
        body = {
            **asdict(own_identity()),
            "ttl_s": float(ttl_s),
            "config": config_digest,
            "token": uuid.uuid4().hex,
        }
        try:
            put_document(backend, layout.epoch(epoch), body)
        except StaleOwnerError as error:
            raise StoreError(
                f"{owner_of(backend, epoch)[0].describe()} took the run {backend.url} at the same "
                "moment; start again when it has ended"
            ) from error
        lease = cls(backend, epoch, ttl_s)
        lease._thread.start()
        return lease

    def guard(self) -> None:
        """Raises StaleOwnerError if a newer owner exists or this one has ended."""
        newest = newest_epoch(self._backend)
        if newest is None or newest.epoch < self.epoch:
            raise StoreError(f"{self._backend.url}/{layout.epoch(self.epoch)} has gone")
        if newest.epoch > self.epoch:
            other = owner_of(self._backend, newest.epoch)[0].describe()
            raise StaleOwnerError(
                f"{other} took over this run (epoch {newest.epoch}, this process has "
                f"{self.epoch}), so this process must stop"
            )
        if self._stop.is_set():
            raise StaleOwnerError(f"epoch {self.epoch} was released, it cannot decide any more")

    def release(self) -> None:
        """Ends the ownership, so that the next start need not wait. May be called twice."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join(timeout=self.ttl_s)
        put_document(self._backend, layout.ended(self.epoch), {"epoch": self.epoch})
        for beat in range(max(0, self._beats - 2), self._beats):
            self._backend.delete(layout.alive(self.epoch, beat))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _refresh(self) -> None:
        """Writes a new mark each quarter of the TTL and deletes the one before."""
        missed = 0
        while not self._stop.wait(self.ttl_s / BEATS_PER_TTL):
            try:
                # Nobody else writes marks of this epoch: one that is there is ours, and only its
                # answer was lost.
                with contextlib.suppress(LostRaceError):
                    self._backend.put_new(layout.alive(self.epoch, self._beats), b"")
                self._beats += 1
                if self._beats > 1:
                    self._backend.delete(layout.alive(self.epoch, self._beats - 2))
                missed = 0
            except StoreError as error:
                level = logging.DEBUG if missed else logging.WARNING
                missed += 1
                log.log(
                    level, "the alive mark of epoch %d was not refreshed: %s", self.epoch, error
                )


async def give_back(lease: Lease, limit_s: float) -> None:
    """Releases a lease. Where the store does not take that in time, the next start finds out by
    itself that this process is gone."""
    giving = beside("give the lease back", lease.release)
    try:
        await within("the lease to be given back", limit_s, giving)
    except (AwayError, DeadlineError) as error:
        log.warning("the lease of epoch %d was not given back: %s", lease.epoch, error)


def owner_of(backend: Backend, epoch: int) -> tuple[ProcessIdentity, float]:
    """Who an owner is, and its TTL in seconds."""
    body = read_document(backend, layout.epoch(epoch)).body
    identity = ProcessIdentity(
        **{name: body[name] for name in ("host", "boot_id", "pid_namespace", "pid", "start_ticks")}
    )
    return identity, body["ttl_s"]


def refuse_living_owner(backend: Backend) -> None:
    """Finds out, before anything is started, that a run is in use by a process of this machine.

    Raises:
        StoreError: its owner is alive; names its pid and when it showed a sign of life.
    """
    held = newest_epoch(backend)
    if held is None or held.ended:
        return
    owner, _ = owner_of(backend, held.epoch)
    if owner.is_gone() is False:
        raise _refused(backend, owner, store_now_s(backend) - held.last_sign_s)


def _wait_until_free(backend: Backend, held: EpochState, take_over: bool) -> None:
    """Returns once the owner may be followed. Raises StoreError if it is alive.

    A process of this machine that is seen to live keeps its run however long its marks stay away,
    as where its store was away; one that this machine cannot see loses it after its TTL.
    """
    owner, ttl_s = owner_of(backend, held.epoch)
    gone = owner.is_gone()
    if gone:
        return
    if take_over:
        log.warning("taking the run over from %s", owner.describe())
        return
    age_s = store_now_s(backend) - held.last_sign_s
    ttl_s += backend.clock_resolution_s
    if gone is False:
        raise _refused(backend, owner, age_s)
    if age_s >= ttl_s:
        return
    log.info("waiting up to %.0f s for %s", ttl_s - age_s, owner.describe())
    deadline = Deadline(f"the lease of {owner.describe()} on {backend.url}", ttl_s - age_s)
    while not deadline.expired:
        time.sleep(min(0.25, ttl_s / (4 * BEATS_PER_TTL), deadline.remaining_s))
        now = newest_epoch(backend)
        if now is None or now.epoch != held.epoch:
            raise StoreError(f"another process took the run {backend.url} in the meantime")
        if now.ended or owner.is_gone():
            return
        if now.last_sign_s > held.last_sign_s:
            raise _refused(backend, owner, store_now_s(backend) - now.last_sign_s)


def _refused(backend: Backend, owner: ProcessIdentity, age_s: float) -> StoreError:
    return StoreError(
        f"the run {backend.url} belongs to {owner.describe()}, which was alive "
        f"{max(0.0, age_s):.1f} s ago; end it first, or use --take-over if it is hung"
    )
