"""The store through fsspec's create mode, over real HTTP: with fsspec's client for S3, whose server
can be had here. Those for Google and Azure take the same calls."""

import pytest

from slime_core.errors import (
    AccessError,
    UnavailableError,
)
from slime_core.store.cache import NodeCache
from slime_core.store.verify import verify_run
from tests.unit.store.builders import run_iteration


def test_an_iteration_is_stored_and_verified(opened):
    store, _ = opened
    run_iteration(store, 0, "s", "")
    assert verify_run(NodeCache(store)) == []


def test_trouble_is_named(opened):
    store, trouble = opened
    trouble.away = (403, "AccessDenied")
    with pytest.raises(AccessError, match="refuses these credentials"):
        store.get("a")


@pytest.mark.slow
def test_a_server_that_stays_away_is_unavailable(opened):
    store, trouble = opened
    trouble.away = (503, "SlowDown")
    with pytest.raises(UnavailableError, match=r"runs/f-"):
        store.get("a")
