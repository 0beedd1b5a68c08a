import json
import math

import pytest

from slime_core.errors import DigestError, MissingError, StaleOwnerError
from slime_core.store.backend import MemoryBackend
from slime_core.store.documents import put_document, read_document
from tests.unit.store.builders import FakeOwner

BODY = {"loss": 0.1, "bad": math.inf, "groups": [[1, 0, "kept", None]], "text": "f:no float"}


def test_documents_come_back_with_their_floats():
    backend = MemoryBackend()
    written = put_document(backend, "d.json", BODY, {"seconds": 0.25}, owner=FakeOwner(3))
    again = read_document(backend, "d.json")
    assert again == written and not again.found
    assert again.body == BODY and again.by == {"seconds": 0.25, "epoch": 3}


def test_only_the_body_decides_who_lost():
    backend = MemoryBackend()
    first = put_document(backend, "d.json", BODY, {"seconds": 1.0}, owner=FakeOwner(0))
    second = put_document(backend, "d.json", dict(BODY), {"seconds": 2.0}, owner=FakeOwner(1))
    assert second.found and second.digest == first.digest and second.by["seconds"] == 1.0
    with pytest.raises(StaleOwnerError, match=r"d\.json was written by .*this one must stop"):
        put_document(backend, "d.json", BODY | {"loss": 0.2})
    assert put_document(backend, "d.json", {}, keep_first=True).body == BODY


def test_the_owner_is_asked_before_anything_is_written():
    class Stale(FakeOwner):
        def guard(self):
            raise StaleOwnerError("gone")

    backend = MemoryBackend()
    with pytest.raises(StaleOwnerError):
        put_document(backend, "d.json", BODY, owner=Stale())
    assert backend.list() == []


def damaged(backend: MemoryBackend, change) -> bytes:
    document = json.loads(backend.get("d.json"))
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["body"].update(loss="f:0.2"),
        lambda document: document["body"]["groups"].append(1),
        lambda document: document.update(digest="0" * 64),
        lambda document: document.pop("by"),
    ],
)
def test_changed_documents_are_found(change):
    backend = MemoryBackend()
    put_document(backend, "d.json", BODY)
    data = damaged(backend, change)
    backend.delete("d.json")
    backend.put_new("d.json", data)
    with pytest.raises(DigestError, match=r"d\.json is damaged"):
        read_document(backend, "d.json")


def test_truncated_and_missing_documents():
    backend = MemoryBackend()
    backend.put_new("d.json", b'{"body":')
    with pytest.raises(DigestError, match="no document"):
        read_document(backend, "d.json")
    with pytest.raises(MissingError):
        read_document(backend, "none.json")


def test_what_the_fast_parser_cannot_read_exactly_is_read_all_the_same():
    body = {"big": 2**70, "control": "\x1b\x7f\u2028", "b": 1, "ä": 2, "Z": [1, "f:x", 0.5]}
    backend = MemoryBackend()
    for number, (name, value) in enumerate(body.items()):
        put_document(backend, f"{number}.json", {name: value, "a": None})
        assert read_document(backend, f"{number}.json").body == {name: value, "a": None}
