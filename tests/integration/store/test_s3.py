"""The store on S3 over real HTTP, in good times and bad ones."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime_core.errors import (
    AccessError,
    ConfigError,
    LostRaceError,
    StoreError,
    UnavailableError,
)
from slime_core.run.epoch import Lease, newest_epoch
from slime_core.store import s3 as s3_module
from slime_core.store.backend import open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.probe import check_create_only
from slime_core.store.s3 import S3Backend, S3Options
from slime_core.store.verify import verify_run
from tests.integration.store.conftest import options
from tests.s3 import ENVIRONMENT, moto_server, troubled, unique_prefix
from tests.unit.store.builders import run_iteration


def test_a_store_lists_nothing_of_its_neighbours(s3_url):
    keys = ["b/10", "b/2", "b-c", "a"]
    one, two = (S3Backend(f"s3://runs/near{end}", options(s3_url)) for end in ("", "-by"))
    for key in keys:
        one.put_new(key, key.encode())
    two.put_new("b/stranger", b"")
    assert [entry.key for entry in one.list()] == sorted(keys)
    assert [(e.key, e.size_bytes) for e in one.list("b/")] == [("b/10", 4), ("b/2", 3)]
    assert abs(one.list("a")[0].modified_s - time.time()) < 60
    root = S3Backend("s3://runs", options(s3_url))
    assert root.get("near/b/2") == b"b/2" and root.url == "s3://runs"


def test_listings_of_many_pages(s3, monkeypatch):
    for i in range(7):
        s3.put_new(f"k/{i}", b"")
    whole = s3._client.list_objects_v2
    monkeypatch.setattr(s3._client, "list_objects_v2", lambda **a: whole(MaxKeys=2, **a))
    assert [entry.key for entry in s3.list("k/")] == [f"k/{i}" for i in range(7)]


def test_racing_writers_have_one_winner(s3):
    meet = threading.Barrier(6)

    def contend(me: int) -> int | None:
        meet.wait(30)
        try:
            s3.put_new("prize", bytes([me]))
        except LostRaceError:
            return None
        return me

    with ThreadPoolExecutor(6) as pool:
        won = [me for me in pool.map(contend, range(6)) if me is not None]
    assert len(won) == 1 and s3.get("prize") == bytes(won)


def test_large_objects_are_created_once_and_whole(s3, monkeypatch):
    monkeypatch.setattr(s3_module, "SINGLE_PUT_BYTES", 2**20)
    monkeypatch.setattr(s3_module, "UPLOAD_PART_BYTES", 5 * 2**20)
    data = bytes(range(256)) * (11 * 2**12)  # 11 MiB: three parts
    s3.put_new("large", data)
    assert s3.get("large") == data
    with pytest.raises(LostRaceError):
        s3.put_new("large", data[::-1])
    assert s3.get("large") == data
    uploads = s3._client.list_multipart_uploads(Bucket="runs").get("Uploads", [])
    assert not [upload for upload in uploads if upload["Key"].endswith("large")]


@pytest.mark.parametrize(
    "answers",
    [
        [(503, "SlowDown")] * 3,
        [(500, "InternalError"), (502, "BadGateway")],
        [(429, "TooManyRequests")],
        [("drop", ""), ("drop", "")],
        [("hang", "")],
        [(409, "ConditionalRequestConflict")],
    ],
    ids=lambda answers: str(answers[0][0]),
)
def test_passing_trouble_passes(shaky, answers):
    backend, trouble = shaky
    trouble.answers = list(answers)
    backend.put_new("a", b"whole")
    trouble.answers = list(answers)
    assert backend.get("a") == b"whole"
    trouble.answers = list(answers)
    assert [entry.key for entry in backend.list()] == ["a"]
    with pytest.raises(LostRaceError):
        backend.put_new("a", b"other")
    assert backend.get("a") == b"whole"


def test_the_writers_token_tells_whose_a_create_is_whose_answer_was_lost(shaky):
    backend, trouble = shaky
    trouble.answers = [("drop", "")]
    backend.put_new("mine", b"mine")  # the server created it, then the second attempt lost to it
    assert trouble.seen[:2] == ["PUT", "PUT"] and trouble.seen[-1] == "HEAD"
    trouble.answers = [("drop", "")]
    with pytest.raises(LostRaceError):
        backend.put_new("mine", b"mine")  # the same bytes, but of another writer


def test_a_large_create_whose_last_answer_is_lost_is_ours(shaky, monkeypatch):
    backend, trouble = shaky
    monkeypatch.setattr(s3_module, "SINGLE_PUT_BYTES", 2**10)
    complete = backend._client.complete_multipart_upload

    def cut(**arguments):
        trouble.answers = trouble.answers or [("drop", "")]
        monkeypatch.setattr(backend._client, "complete_multipart_upload", complete)
        return complete(**arguments)

    monkeypatch.setattr(backend._client, "complete_multipart_upload", cut)
    backend.put_new("large", b"x" * 2**12)
    assert backend.get("large") == b"x" * 2**12


def test_lasting_trouble_ends_at_the_deadline_and_leaves_nothing(shaky):
    backend, trouble = shaky
    trouble.answers = [(503, "SlowDown")] * 1000
    start = time.monotonic()
    with pytest.raises(UnavailableError, match=r"s3://runs/.*/a: .*SlowDown, HTTP 503"):
        backend.put_new("a", b"1")
    assert 0.5 < time.monotonic() - start < 60
    assert 2 < len(trouble.seen) < 200, "it waits between attempts"
    trouble.answers = []
    assert backend.list() == []


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (400, "ExpiredToken", "credentials have expired .*: renew them"),
        (403, "InvalidAccessKeyId", "refuses these credentials"),
        (403, "SignatureDoesNotMatch", "AWS_ACCESS_KEY_ID"),
        (403, "AccessDenied", "AccessDenied"),
        (403, "RequestTimeTooSkewed", "clock is wrong"),
    ],
)
def test_credentials_are_named_at_once(shaky, status, code, message):
    backend, trouble = shaky
    trouble.answers = [(status, code)] * 2
    with pytest.raises(AccessError, match=message):
        backend.put_new("a", b"1")
    assert len(trouble.seen) == 2, "once with the credentials at hand, once with those read anew"
    trouble.answers = [(status, code)] * 2
    with pytest.raises(AccessError, match=message):
        backend.list()


def test_credentials_that_are_renewed_are_taken(s3_url, tmp_path, monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    keys = "[default]\naws_access_key_id = {}\naws_secret_access_key = s\n"
    file.write_text(keys.format("OLDKEY"))
    with troubled(s3_url) as (url, trouble):
        trouble.expired = "OLDKEY"
        backend = S3Backend(unique_prefix("t"), S3Options(url, "us-east-1", deadline_s=2))
        with pytest.raises(AccessError, match="expired"):
            backend.put_new("a", b"1")
        file.write_text(keys.format("NEWKEY"))
        backend.put_new("a", b"1")
        trouble.seen.clear()
        assert backend.get("a") == b"1" and trouble.seen == ["GET"]


def test_what_a_person_can_get_wrong(s3_url, monkeypatch, tmp_path):
    with pytest.raises(StoreError, match="bucket does not exist; create it"):
        S3Backend("s3://nobody-made-this/x", options(s3_url)).put_new("a", b"")
    with pytest.raises(ConfigError, match="name a bucket"):
        open_backend("s3:///x")
    away = S3Options("http://127.0.0.1:9", "us-east-1", "k", "s", deadline_s=0.3)
    with pytest.raises(UnavailableError, match="cannot be reached"):
        S3Backend("s3://runs/x", away).get("a")
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    nobody = S3Options(s3_url, "us-east-1", deadline_s=1.25)
    with pytest.raises(AccessError, match="no usable credentials"):
        S3Backend("s3://runs/x", nobody).get("a")


def test_options_come_from_fsspec_or_the_environment(s3_url, monkeypatch):
    import fsspec.config

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": s3_url})
    open_backend("s3://runs/by-fsspec").put_new("a", b"1")
    monkeypatch.delitem(fsspec.config.conf, "s3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    assert open_backend("s3://runs/by-fsspec").get("a") == b"1"
    assert "secret" not in repr(options(s3_url))


def test_a_process_follows_its_environment_to_another_server(s3_url, monkeypatch):
    """A client is kept for its options; what those leave out is the environment's of now."""
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": s3_url}.items():
        monkeypatch.setenv(name, value)
    open_backend("s3://runs/moves").put_new("a", b"1")
    with moto_server() as other:
        monkeypatch.setenv("AWS_ENDPOINT_URL", other)
        assert open_backend("s3://runs/moves").list() == [], "another server's bucket"
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    assert open_backend("s3://runs/moves").get("a") == b"1"


def test_a_server_that_overwrites_is_refused_at_the_start(shaky):
    backend, trouble = shaky
    check_create_only(backend)
    trouble.deaf = True
    with pytest.raises(StoreError, match="takes no notice of If-None-Match"):
        Lease.acquire(backend)
    assert backend.list() == []


def test_a_lease_by_the_servers_clock(s3):
    with Lease.acquire(s3, ttl_s=4) as lease:
        lease.guard()
        with pytest.raises(StoreError, match="which was alive"):
            Lease.acquire(s3, ttl_s=4)
    newest = newest_epoch(s3)
    assert newest is not None and newest.ended
    Lease.acquire(s3, ttl_s=4).release()


def test_a_whole_history_verifies_through_a_node_cache(s3, tmp_path):
    state, seal = run_iteration(s3, 0, "start", "")
    run_iteration(s3, 1, state, seal)
    cache = NodeCache(s3, tmp_path)
    assert verify_run(cache, "start") == []
    assert len(list(tmp_path.rglob("*.arrow"))) == 6
    key = next(e.key for e in s3.list("groups/") if e.key.endswith(".arrow"))
    data = s3.get(key)
    s3.delete(key)
    s3.put_new(key, data[:-100] + bytes(100))
    assert any("damaged" in problem for problem in verify_run(NodeCache(s3), "start"))
