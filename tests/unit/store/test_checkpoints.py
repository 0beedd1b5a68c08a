import pytest

from slime_core.errors import DigestError, StoreError
from slime_core.store import layout
from slime_core.store.backend import MemoryBackend, open_backend
from slime_core.store.checkpoints import (
    checkpoint_directory,
    list_checkpoints,
    put_manifest,
    verify_checkpoint,
)
from tests.unit.store.builders import FakeOwner


@pytest.fixture
def backend(tmp_path):
    return open_backend(str(tmp_path))


def save(backend, iteration: int, epoch: int = 0, state: str = "s"):
    directory = checkpoint_directory(backend, iteration, epoch)
    (directory / "ranks").mkdir()
    (directory / "ranks" / "0.distcp").write_bytes(b"weights" * 100)
    (directory / "empty").write_bytes(b"")
    return put_manifest(
        backend, FakeOwner(epoch), iteration=iteration, state=state,
        weight_version=f"a-{iteration + 1}", about={"frontier": {"next_seq": 3}, "loss": 0.5},
    )  # fmt: skip


def test_a_checkpoint_counts_once_its_manifest_stands(backend):
    checkpoint_directory(backend, 0, 0).joinpath("x").write_bytes(b"1")
    assert list_checkpoints(backend) == []
    saved = [save(backend, 1), save(backend, 3), save(backend, 3, epoch=2)]
    assert list_checkpoints(backend) == saved[::-1]
    newest = saved[-1]
    assert newest.about == {"frontier": {"next_seq": 3}, "loss": 0.5}
    assert [name for name, *_ in newest.files] == ["empty", "ranks/0.distcp"]
    assert newest.size_bytes == 700
    assert verify_checkpoint(backend, newest) == checkpoint_directory(backend, 3, 2)


@pytest.mark.parametrize("damage", ["missing", "shorter", "flipped"])
def test_damaged_files_are_named(backend, damage):
    checkpoint = save(backend, 1)
    path = checkpoint_directory(backend, 1, 0) / "ranks" / "0.distcp"
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[:-1] if damage == "shorter" else b"W" + data[1:])
    with pytest.raises(DigestError, match=r"0\.distcp is (missing|damaged)"):
        verify_checkpoint(backend, checkpoint)


def test_a_damaged_manifest_leaves_the_older_checkpoint(backend, caplog):
    older, newer = save(backend, 1), save(backend, 3)
    backend.delete(layout.manifest(3, 0))
    backend.put_new(layout.manifest(3, 0), b"{}")
    assert list_checkpoints(backend) == [older] and newer.iteration == 3
    assert "checkpoint 3 is left out" in caplog.text


def test_no_files_no_checkpoint(backend):
    checkpoint_directory(backend, 1, 0)
    with pytest.raises(StoreError, match="holds no files"):
        put_manifest(backend, FakeOwner(), iteration=1, state="s", weight_version="a-2", about={})
    with pytest.raises(StoreError, match="not there yet; use a local store"):
        checkpoint_directory(MemoryBackend(), 1, 0)
