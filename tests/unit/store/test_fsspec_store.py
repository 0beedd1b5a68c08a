"""What the clients for Google and Azure say, as one named error each."""

from __future__ import annotations

import pytest

from slime_core.errors import AccessError, LostRaceError, MissingError, StoreError, UnavailableError
from slime_core.store.fsspec_store import FsspecBackend


class Answer(Exception):
    """An HTTP answer as a client raises it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


class Files:
    """A file system that raises these errors, one a call, after it has done what it was asked."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0
        self.objects: dict[str, bytes] = {}

    def pipe_file(self, path: str, content: bytes, mode: str) -> None:
        self._called()
        assert mode == "create"
        taken = path in self.objects
        self.objects.setdefault(path, content)
        self._raise()
        if taken:
            raise FileExistsError(path)

    def cat_file(self, path: str) -> bytes:
        self._called()
        self._raise()
        return self.objects[path]

    def _called(self) -> None:
        self.calls += 1

    def _raise(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


def store_of(*errors: Exception, patience_s: float = 60.0) -> tuple[FsspecBackend, Files]:
    store, files = FsspecBackend("memory://bucket/p", patience_s), Files(*errors)
    store._files = files
    return store, files


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError("Forbidden: https://storage/o/a"), AccessError, "refuses these credentials"),
        (PermissionError("no"), AccessError, "refuses these credentials"),
        (Answer(401), AccessError, "renew them"),
        (Answer(404), MissingError, "is not there"),
        (Answer(400), StoreError, "HTTP 400"),
        (AttributeError("no such method"), StoreError, "AttributeError: no such method"),
        (NotImplementedError("mode"), StoreError, "NotImplementedError: mode"),
        (TypeError("mode"), StoreError, "TypeError: mode"),
    ],
    ids=repr,
)
def test_what_no_other_attempt_helps_is_named_at_once(error, kind, message):
    store, files = store_of(error)
    with pytest.raises(kind, match=f"memory://bucket/p/a.*{message}") as raised:
        store.get("a")
    assert type(raised.value) is kind and files.calls == 1


@pytest.mark.parametrize("error", [Answer(503), Answer(429), OSError("reset"), TimeoutError()])
def test_what_passes_is_tried_again(error):
    store, files = store_of(error)
    files.objects["bucket/p/a"] = b"whole"
    assert store.get("a") == b"whole" and files.calls == 2
    store, _ = store_of(error, patience_s=0.0)
    with pytest.raises(UnavailableError, match="memory://bucket/p/a"):
        store.get("a")


@pytest.mark.parametrize(
    "lost", [FileExistsError("a"), Answer(412), OSError("reset")], ids=["own retry", "412", "reset"]
)
def test_a_create_whose_answer_was_lost_is_ours_and_only_ours(lost):
    """A client that asks again by itself is told that the object exists: the one it has made."""
    store, files = store_of(lost)
    store.put_new("a", b"mine")
    assert files.objects == {"bucket/p/a": b"mine"}
    with pytest.raises(LostRaceError, match="a exists already"):
        store.put_new("a", b"other")
    assert files.objects == {"bucket/p/a": b"mine"}
