import errno
import os
import sys
from pathlib import Path

import pytest

from slime_core.errors import ConfigError, LostRaceError, MissingError, StoreError
from slime_core.store.backend import FileBackend, MemoryBackend, join_url, open_backend


@pytest.fixture(params=["file", "file-fsync", "memory"])
def backend(request, tmp_path):
    if request.param == "memory":
        return open_backend("memory://")
    return open_backend(str(tmp_path / "store"), fsync=request.param == "file-fsync")


def test_an_object_is_created_once_and_whole(backend):
    backend.put_new("a/b/c.json", b"first")
    with pytest.raises(LostRaceError, match=r"c\.json"):
        backend.put_new("a/b/c.json", b"second")
    assert backend.get("a/b/c.json") == b"first"


def test_ranges(backend):
    backend.put_new("x", memoryview(b"0123456789"))
    assert backend.get_range("x", 2, 3) == b"234"
    assert backend.get_range("x", 8, 5) == b"89"
    assert backend.get_range("x", 20, 5) == b""


def test_list_is_sorted_and_by_prefix(backend):
    for key in ("b/2", "b/10", "a", "b-c", "b/d/e"):
        backend.put_new(key, key.encode())
    assert [entry.key for entry in backend.list()] == ["a", "b-c", "b/10", "b/2", "b/d/e"]
    assert [entry.key for entry in backend.list("b/")] == ["b/10", "b/2", "b/d/e"]
    assert [entry.key for entry in backend.list("b/1")] == ["b/10"]
    assert backend.list("nothing/") == []
    entry = backend.list("b/10")[0]
    assert entry.size_bytes == 4 and entry.modified_s > 1.7e9


def test_missing_objects_are_named(backend):
    for read in (backend.get, lambda key: backend.get_range(key, 0, 1)):
        with pytest.raises(MissingError, match="a/none"):
            read("a/none")


def test_delete_frees_the_key_and_may_be_repeated(backend):
    backend.put_new("a/x", b"1")
    backend.delete("a/x")
    backend.delete("a/x")
    assert backend.list() == []
    backend.put_new("a/x", b"2")
    assert backend.get("a/x") == b"2"


def test_empty_objects(backend):
    backend.put_new("empty", b"")
    assert backend.get("empty") == b"" and backend.list()[0].size_bytes == 0


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/..", "a/", "./a"])
def test_keys_cannot_leave_the_store(backend, key):
    with pytest.raises(StoreError, match="is not a key"):
        backend.put_new(key, b"")


def test_nothing_temporary_is_listed_or_left(tmp_path):
    backend = FileBackend(tmp_path)
    backend.put_new("a/x", b"1")
    with pytest.raises(LostRaceError):
        backend.put_new("a/x", b"2")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["x"]


def test_what_killed_writers_left_is_swept_when_it_is_old(tmp_path):
    FileBackend(tmp_path)
    old, new = tmp_path / ".tmp" / "old", tmp_path / ".tmp" / "new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    FileBackend(tmp_path)
    assert new.exists() and not old.exists()


def test_urls(tmp_path):
    a, b = open_backend(f"file://{tmp_path}/with%20space"), open_backend(f"{tmp_path}/with space")
    a.put_new("x", b"1")
    assert b.get("x") == b"1" and a.url == b.url
    assert a.local_path("x") == tmp_path / "with space" / "x"
    assert join_url("file:///a/", "run", "x") == "file:///a/run/x"
    assert isinstance(open_backend("memory://"), MemoryBackend)


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_schemes_without_their_client_say_so(scheme, monkeypatch):
    for client in ("gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, client, None)
    with pytest.raises(ConfigError, match=rf"pip install 'slime-flow\[{scheme}\]'"):
        open_backend(f"{scheme}://bucket/run")
    with pytest.raises(ConfigError, match="unknown scheme ftp://"):
        open_backend("ftp://x")


def test_a_file_where_a_directory_should_be(tmp_path):
    (tmp_path / "store").write_text("")
    with pytest.raises(StoreError, match="is a file, not a directory"):
        open_backend(str(tmp_path / "store"))
    backend = open_backend(str(tmp_path / "other"))
    backend.put_new("a", b"")
    with pytest.raises(StoreError, match="is a file, not a directory"):
        backend.put_new("a/b", b"")


@pytest.fixture
def closed_folder(tmp_path):
    tmp_path.chmod(0o500)
    yield tmp_path
    tmp_path.chmod(0o700)


@pytest.fixture
def ordinary_user():
    """Tests run as root, too, who may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_without_write_permission(closed_folder, ordinary_user):
    with pytest.raises(StoreError, match=r"cannot be written by user id .*--store-url"):
        open_backend(str(closed_folder / "store"))


def test_a_read_only_file_system():
    proc = Path("/proc/self")
    if not proc.exists():
        pytest.skip("needs /proc")
    with pytest.raises(StoreError, match="/proc/self/store"):
        open_backend(str(proc / "store"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "no space left to write"),
        (errno.EDQUOT, "no space left to write"),
        (errno.EROFS, "cannot be written by user id"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_trouble_while_writing_is_one_sentence_and_leaves_nothing(
    tmp_path, monkeypatch, code, message
):
    backend = FileBackend(tmp_path)

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("slime_core.store.backend.os.write", refuse)
    with pytest.raises(StoreError, match=message) as caught:
        backend.put_new("a/x", b"1")
    assert "\n" not in str(caught.value) and "a/x" in str(caught.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_system_without_hard_links_is_named(tmp_path, monkeypatch):
    backend = FileBackend(tmp_path)

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr("slime_core.store.backend.os.link", refuse)
    with pytest.raises(StoreError, match="has no hard links"):
        backend.put_new("a/x", b"1")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_fsync_reaches_the_file_and_every_directory_of_its_name(tmp_path, monkeypatch):
    synced = []
    real = os.fsync

    def record(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    monkeypatch.setattr("slime_core.store.backend.os.fsync", record)
    root = tmp_path / "store"
    FileBackend(root, fsync=True).put_new("a/b/x", b"1")
    temporary = [path for path in synced if path.parent.name == ".tmp"]
    assert len(temporary) == 1
    assert {tmp_path, root, root / "a", root / "a" / "b"} <= set(synced)
    assert synced.index(temporary[0]) < len(synced) - 1 and synced[-1] == root / "a" / "b"
    synced.clear()
    FileBackend(tmp_path / "fast").put_new("a/b/x", b"1")
    assert synced == []


def test_a_store_opened_for_reading_creates_nothing_and_refuses_to_write(tmp_path):
    root = tmp_path / "store"
    reader = open_backend(str(root), read_only=True)
    assert reader.list() == [] and not root.exists()
    for write in (lambda: reader.put_new("a", b"1"), lambda: reader.delete("a")):
        with pytest.raises(StoreError, match="opened for reading only"):
            write()
    open_backend(str(root)).put_new("a", b"1")
    assert reader.get("a") == b"1" and [entry.key for entry in reader.list()] == ["a"]
