"""The answers of an evaluation as rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from slime_core.errors import LostRaceError
from slime_core.sample import Sample
from slime_core.store.backend import Backend
from slime_core.store.codec import samples_to_rows
from slime_core.store.parts import serialise
from slime_core.store.schema import SCHEMA_VERSION


def put_eval_rows(backend: Backend, key: str, samples: Sequence[Sample]) -> None:
    """Stores the samples of an evaluation; the first to write stays."""
    rows = samples_to_rows(samples)
    about = {"format": "slime-flow evaluation", "version": SCHEMA_VERSION}
    with suppress(LostRaceError):
        backend.put_new(key, memoryview(serialise([rows], rows.schema, about)))
