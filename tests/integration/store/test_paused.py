"""An iteration is stored while the server is away for a time: whole in the end, and equal."""

import asyncio
import itertools
import threading

import pytest

from slime_core.errors import UnavailableError
from slime_core.run import pause as pause_module
from slime_core.run.pause import Patience, Pause, paused_runs
from slime_core.store.batch import put_batch
from slime_core.store.cache import NodeCache
from slime_core.store.draws import log_draws
from slime_core.store.s3 import S3Backend
from slime_core.store.seal import adopt
from slime_core.store.verify import verify_run
from tests.integration.store.conftest import options
from tests.s3 import troubled, unique_prefix
from tests.unit.store.builders import (
    FakeOwner,
    add_ledger,
    batch_content,
    draw,
    group_rows,
    seal_segment,
    write_groups,
)


def stored(backend, serial) -> str:
    """An iteration as the stages store it, from where it stands; returns its state."""
    log_draws(backend, 0, [draw(0, 0), draw(1, 0)])
    there = {group.entry.group_id for group in adopt(NodeCache(backend), 0).groups}
    for group in {0, 1} - there:
        write_groups(backend, 0, [group_rows(group)], seq=next(serial))
    batch = put_batch(backend, FakeOwner(), batch_content(0, seal_segment(backend, 0)))
    return add_ledger(backend, batch, "s").state


@pytest.mark.parametrize(
    ("away", "at"),
    [((503, "SlowDown"), 3), ((403, "AccessDenied"), 1), ((400, "ExpiredToken"), 5)],
    ids=["throttled", "refused", "expired"],
)
def test_an_iteration_is_whole_after_a_pause(s3_url, s3, tmp_path, monkeypatch, away, at):
    monkeypatch.setattr(pause_module, "FIRST_WAIT_S", 0.05)
    (tmp_path / "local/r").mkdir(parents=True)
    untouched = S3Backend(unique_prefix("u"), options(s3_url))
    state = stored(untouched, itertools.count())
    with troubled(s3_url) as (url, trouble):
        backend = S3Backend(s3.url, options(url, deadline_s=1))
        told: list[Pause | None] = []

        async def tell(pause: Pause | None) -> None:
            told.append(pause)
            if pause is not None:
                assert paused_runs(tmp_path) == [pause]
                threading.Timer(0.3, lambda: setattr(trouble, "away", None)).start()

        patience = Patience("r", "", tmp_path / "local/r", 60.0, tell)
        probe = S3Backend(s3.url, options(url, deadline_s=0.2))
        monkeypatch.setattr(patience, "_probe", lambda: pause_module.check_usable(probe))
        states: list[str] = []
        requests, serial = 0, itertools.count()
        whole = backend.put_new

        def breaks(key, data):
            nonlocal requests
            requests += 1
            if requests == at:
                trouble.away = away
            whole(key, data)

        monkeypatch.setattr(backend, "put_new", breaks)

        async def work() -> None:
            states.append(await asyncio.to_thread(stored, backend, serial))

        asyncio.run(patience.bear("pack 000000", work))
    assert [pause is None for pause in told] == [False, True]
    assert told[0] is not None and away[1] in told[0].cause
    assert verify_run(NodeCache(s3)) == []
    assert states == [state]
    assert len(s3.list("groups/")) == 3, "two parts and the seal: nothing twice"


def test_a_server_that_stays_away_ends_with_its_cause(s3_url, s3, tmp_path, monkeypatch):
    monkeypatch.setattr(pause_module, "FIRST_WAIT_S", 0.05)
    (tmp_path / "local/r").mkdir(parents=True)
    with troubled(s3_url) as (url, trouble):
        trouble.away = (503, "SlowDown")
        backend = S3Backend(s3.url, options(url, deadline_s=0.3))

        async def tell(_: Pause | None) -> None:
            return

        async def work() -> None:
            await asyncio.to_thread(backend.put_new, "a", b"")

        patience = Patience("r", "", tmp_path / "local/r", 0.5, tell)
        monkeypatch.setattr(patience, "_probe", lambda: pause_module.check_usable(backend))
        with pytest.raises(UnavailableError, match=r"SlowDown, HTTP 503.*--store-pause-s 0.5"):
            asyncio.run(patience.bear("pack 000000", work))
    assert s3.list() == []
