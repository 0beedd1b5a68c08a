"""JSON documents `{body, digest, by}`: what was decided, its sha256, and who wrote it when.

Only the body counts. Epochs, times, seconds, run ids and part names belong in `by`, so that two
owners that decided the same wrote the same document.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import orjson

from slime_core.errors import DigestError, LostRaceError, StaleOwnerError
from slime_core.refs import canonical, digest_of, restore
from slime_core.store.backend import Backend


@dataclass(frozen=True)
class Document:
    """A stored document.

    Attributes:
        key: where it stands.
        body: what it says.
        digest: sha256 of the body's canonical JSON.
        by: who wrote it, and whatever else two owners may say differently.
        found: it stood there already, written by somebody else.
    """

    key: str
    body: dict[str, Any]
    digest: str
    by: dict[str, Any] = field(default_factory=dict)
    found: bool = False


class Owner(Protocol):
    """Whoever may decide for a run (run.epoch.Lease)."""

    @property
    def epoch(self) -> int: ...

    def guard(self) -> None:
        """Raises StaleOwnerError if a newer owner exists."""
        ...


def put_document(
    backend: Backend,
    key: str,
    body: dict[str, Any],
    by: dict[str, Any] | None = None,
    *,
    owner: Owner | None = None,
    keep_first: bool = False,
) -> Document:
    """Creates a document. One with an equal body that stands there already is returned instead.

    Args:
        owner: is asked to guard itself first, and its epoch goes into `by`. Seals, batches,
            ledgers and manifests need one.
        keep_first: whatever stands there already is right (scores, say, that differ by chance).

    Raises:
        StaleOwnerError: the key holds a document that says something else, or the owner is stale.
    """
    by = dict(by or {})
    if owner is not None:
        owner.guard()
        by["epoch"] = owner.epoch
    digest = digest_of(body)
    text = {"body": canonical(body), "digest": digest, "by": canonical(by)}
    data = json.dumps(text, ensure_ascii=False, separators=(",", ":")).encode()
    try:
        backend.put_new(key, data)
    except LostRaceError as error:
        other = read_document(backend, key)
        if other.digest != digest and not keep_first:
            raise StaleOwnerError(
                f"{key} was written by {other.by or 'somebody else'} and says something else: "
                "another process owns this run, so this one must stop"
            ) from error
        return replace(other, found=True)
    return Document(key, restore(text["body"]), digest, restore(text["by"]))


def read_document(backend: Backend, key: str) -> Document:
    """Reads and verifies a document.

    Raises:
        MissingError: there is none.
        DigestError: it is no such document, or its body is not what was signed.
    """
    data = backend.get(key)
    try:
        text, found = _parsed(data)
        body, digest, by = text["body"], text["digest"], text["by"]
    except (ValueError, KeyError, TypeError) as error:
        raise DigestError(f"{backend.url}/{key} is damaged: no document stands there") from error
    if found != digest:
        raise DigestError(f"{backend.url}/{key} is damaged: its body has digest {found}")
    if b'"f:' in data or b'"s:' in data:
        body, by = restore(body), restore(by)
    return Document(key, body, digest, by)


def _parsed(data: bytes) -> tuple[Any, str]:
    """The JSON of a document, and the digest of its body as it stands there (floats are text).

    The fast parser is believed where the digest proves that it read everything exactly: it makes
    floats of integers beyond 64 bits.
    """
    try:
        text = orjson.loads(data)
        found = hashlib.sha256(orjson.dumps(text["body"], option=orjson.OPT_SORT_KEYS)).hexdigest()
        if found == text["digest"]:
            return text, found
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, KeyError, TypeError):
        pass  # the plain parser says what is wrong, if anything is
    text = json.loads(data)
    exact = json.dumps(text["body"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text, hashlib.sha256(exact.encode()).hexdigest()
