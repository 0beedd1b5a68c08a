"""What stages pass to each other: small references to stored things, and the digests behind."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

JSONValue = Any


@dataclass(frozen=True)
class Ref:
    """Points to a stored object.

    Attributes:
        uri: key below the run's prefix in the store.
        kind: draws, seal, scores, batch, ledger, sync or eval.
        iteration: the segment or iteration it belongs to.
        rows: samples in it (0 where it does not apply).
        tokens: response tokens in it (0 where it does not apply).
        digest: sha256 of the canonical body.
        from_store: the stage found it there and did nothing.
    """

    uri: str
    kind: str
    iteration: int
    rows: int = 0
    tokens: int = 0
    digest: str = ""
    from_store: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def canonical(value: JSONValue) -> JSONValue:
    """Makes a JSON document whose text is the same wherever it is written.

    Floats become their repr (NaN and Inf too) so that no JSON library can change them.
    """
    if isinstance(value, str):
        return f"s:{value}" if value.startswith(("f:", "s:")) else value
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return f"f:{value!r}"
    if isinstance(value, dict):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot stand in a store document: {value!r}")


def restore(value: JSONValue) -> JSONValue:
    """The inverse of `canonical`: marked strings become floats (or plain strings) again."""
    if isinstance(value, str):
        if value.startswith("f:"):
            return float(value[2:])
        return value[2:] if value.startswith("s:") else value
    if isinstance(value, dict):
        return {key: restore(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restore(item) for item in value]
    return value


def canonical_json(value: JSONValue) -> bytes:
    """Canonical bytes: sorted keys, no spaces, UTF-8."""
    return json.dumps(
        canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()


def digest_of(value: JSONValue) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def is_finite(value: float | None) -> bool:
    """True for a number that is neither NaN nor infinite."""
    return value is not None and math.isfinite(value)
