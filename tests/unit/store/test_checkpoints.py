import pytest

from slime_core.errors import DigestError, StoreError
from slime_core.run.checkpoints import remove_old
from slime_core.store import layout
from slime_core.store.backend import MemoryBackend, open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.checkpoints import (
    checkpoint_directory,
    fetch_checkpoint,
    list_checkpoints,
    put_checkpoint,
    verify_checkpoint,
)
from tests.unit.store.builders import FakeOwner


@pytest.fixture(params=["local", "remote"])
def cache(request, tmp_path):
    """A store that holds folders itself, and one that only takes objects."""
    if request.param == "local":
        return NodeCache(open_backend(str(tmp_path / "store")))
    return NodeCache(MemoryBackend(), tmp_path / "cache")


@pytest.fixture
def elsewhere(cache, tmp_path):
    """The same store seen from another machine."""
    return NodeCache(cache.backend, tmp_path / "other")


def save(cache, iteration: int, epoch: int = 0, state: str = "s"):
    directory = checkpoint_directory(cache, iteration, epoch)
    (directory / "ranks").mkdir(parents=True)
    (directory / "ranks" / "0.distcp").write_bytes(b"weights" * 100)
    (directory / "empty").write_bytes(b"")
    return put_checkpoint(
        cache, FakeOwner(epoch), iteration=iteration, state=state,
        weight_version=f"a-{iteration + 1}", about={"frontier": {"next_seq": 3}, "loss": 0.5},
    )  # fmt: skip


def begin(cache, iteration: int, name: str) -> None:
    """What a save leaves that was cut off after one file."""
    directory = checkpoint_directory(cache, iteration, 0)
    directory.mkdir(parents=True)
    (directory / name).write_bytes(b"half")


def damage(backend, key: str, data: bytes | None) -> None:
    backend.delete(key)
    if data is not None:
        backend.put_new(key, data)


def test_a_checkpoint_counts_once_its_manifest_stands(cache):
    begin(cache, 0, "x")
    assert list_checkpoints(cache.backend) == []
    saved = [save(cache, 1), save(cache, 3), save(cache, 3, epoch=2)]
    assert list_checkpoints(cache.backend) == saved[::-1]
    newest = saved[-1]
    assert newest.about == {"frontier": {"next_seq": 3}, "loss": 0.5}
    assert [name for name, *_ in newest.files] == ["empty", "ranks/0.distcp"]
    assert newest.size_bytes == 700


def test_another_machine_gets_every_file(cache, elsewhere):
    checkpoint = save(cache, 1)
    for _ in range(2):  # the second time the files are here already
        folder = fetch_checkpoint(elsewhere, checkpoint)
        assert (folder / "ranks" / "0.distcp").read_bytes() == b"weights" * 100
        assert (folder / "empty").read_bytes() == b""


def test_a_damaged_copy_of_this_node_is_fetched_again(tmp_path):
    cache = NodeCache(MemoryBackend(), tmp_path)
    checkpoint = save(cache, 1)
    for data in (b"w", b"W" * 700):
        path = fetch_checkpoint(cache, checkpoint) / "ranks" / "0.distcp"
        path.write_bytes(data)
        assert fetch_checkpoint(cache, checkpoint) / "ranks" / "0.distcp" == path
        assert path.read_bytes() == b"weights" * 100


def test_an_attempt_that_was_cut_off_leaves_nothing(cache):
    save(cache, 1)
    cache.backend.delete(layout.manifest(1, 0))
    begin(cache, 1, "other")
    again = put_checkpoint(
        cache, FakeOwner(), iteration=1, state="s", weight_version="a-2", about={}
    )
    assert [name for name, *_ in again.files] == ["other"]
    names = [entry.key.rpartition("/")[2] for entry in cache.backend.list(layout.CHECKPOINTS)]
    assert names == ["manifest.json", "other"]


@pytest.mark.parametrize("how", ["missing", "shorter", "flipped"])
def test_damaged_files_are_named(cache, elsewhere, how):
    checkpoint = save(cache, 1)
    data = b"weights" * 100
    key = f"{checkpoint.key}ranks/0.distcp"
    changed = {"missing": None, "shorter": data[:-1], "flipped": b"W" + data[1:]}[how]
    verify_checkpoint(elsewhere, checkpoint)
    damage(cache.backend, key, changed)
    for check in (fetch_checkpoint, verify_checkpoint):
        with pytest.raises(DigestError, match=r"0\.distcp is (missing|damaged)"):
            check(elsewhere, checkpoint)


def test_a_file_that_was_added_is_named_and_not_taken(cache, elsewhere):
    checkpoint = save(cache, 1)
    cache.backend.put_new(f"{checkpoint.key}ranks/1.distcp", b"x")
    with pytest.raises(DigestError, match=r"ranks/1\.distcp is no file of its checkpoint's"):
        verify_checkpoint(elsewhere, checkpoint)
    folder = fetch_checkpoint(elsewhere, checkpoint)
    if cache.backend.local_path("x") is None:
        assert not (folder / "ranks" / "1.distcp").exists()


def test_a_damaged_manifest_leaves_the_older_checkpoint(cache, caplog):
    older, newer = save(cache, 1), save(cache, 3)
    damage(cache.backend, layout.manifest(3, 0), b"{}")
    assert list_checkpoints(cache.backend) == [older] and newer.iteration == 3
    assert "checkpoint 3 is left out" in caplog.text


def test_old_and_unfinished_ones_are_removed(cache, tmp_path):
    save(cache, 1)
    kept = [save(cache, 5), save(cache, 3)]
    save(cache, 4, epoch=1)
    cache.backend.delete(layout.manifest(4, 1))
    remove_old(cache, 2)
    assert list_checkpoints(cache.backend) == kept
    left = {entry.key.split("/")[1] for entry in cache.backend.list(layout.CHECKPOINTS)}
    assert left == {"000003-000000", "000005-000000"}
    assert {path.parent.name for path in tmp_path.rglob("empty")} == left
    verify_checkpoint(cache, kept[0])


def test_no_files_no_checkpoint(cache):
    checkpoint_directory(cache, 1, 0)
    with pytest.raises(StoreError, match="holds no files"):
        put_checkpoint(cache, FakeOwner(), iteration=1, state="s", weight_version="a-2", about={})
    with pytest.raises(StoreError, match="need a node cache"):
        checkpoint_directory(NodeCache(MemoryBackend()), 1, 0)
