"""What every remote store promises, over real HTTP, through each of the clients."""

import time

import pytest

from slime_core.errors import LostRaceError, MissingError, StoreError
from slime_core.store.probe import check_create_only


@pytest.fixture(params=["shaky", "opened"], ids=["s3", "fsspec"])
def remote(request):
    """(a store behind a proxy, what makes the proxy's trouble)"""
    return request.getfixturevalue(request.param)


def test_the_five_verbs(remote):
    store, _ = remote
    assert store.list() == []
    store.put_new("a/b", b"first")
    with pytest.raises(LostRaceError, match="a/b exists already"):
        store.put_new("a/b", b"second")
    store.put_new("a-digits", memoryview(b"0123456789"))
    assert store.get("a/b") == b"first"
    assert (
        store.get_range("a-digits", 2, 3) == b"234" and store.get_range("a-digits", 8, 5) == b"89"
    )
    assert store.get_range("a-digits", 20, 5) == b"" and store.get_range("a-digits", 0, 0) == b""
    store.put_new("empty", b"")
    assert store.get("empty") == b""
    assert [(e.key, e.size_bytes) for e in store.list()] == [
        ("a-digits", 10),
        ("a/b", 5),
        ("empty", 0),
    ]
    assert [e.key for e in store.list("a/")] == ["a/b"] and store.list("none/x") == []
    assert abs(store.list("a/")[0].modified_s - time.time()) < 60
    for read in (store.get, lambda key: store.get_range(key, 0, 1)):
        with pytest.raises(MissingError, match="a/none is not there"):
            read("a/none")
    store.delete("a/b")
    store.delete("a/b")
    assert [entry.key for entry in store.list()] == ["a-digits", "empty"]
    with pytest.raises(StoreError, match="is not a key"):
        store.put_new("../x", b"")


def test_a_server_that_takes_no_notice_of_the_precondition_is_refused(remote):
    store, trouble = remote
    check_create_only(store)
    trouble.deaf = True
    with pytest.raises(StoreError, match="takes no notice of"):
        check_create_only(store)


def test_a_create_whose_answer_is_lost_is_still_ours_and_only_ours(remote):
    store, trouble = remote
    store.put_new("taken", b"first")
    trouble.methods = ("PUT",)
    trouble.answers = [("drop", "")]
    with pytest.raises(LostRaceError):
        store.put_new("taken", b"second")
    trouble.answers = [("drop", "")]
    store.put_new("mine", b"mine")
    assert trouble.answers == [] and store.get("mine") == b"mine" and store.get("taken") == b"first"
