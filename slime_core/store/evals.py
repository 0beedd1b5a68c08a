"""The answers of an evaluation as rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pyarrow as pa

from slime_core.errors import LostRaceError
from slime_core.sample import Sample
from slime_core.store.backend import Backend
from slime_core.store.codec import decode_samples, samples_to_rows
from slime_core.store.parts import serialise
from slime_core.store.schema import SCHEMA_VERSION


def put_eval_rows(backend: Backend, key: str, samples: Sequence[Sample]) -> None:
    """Stores the samples of an evaluation; the first to write stays."""
    rows = samples_to_rows(samples)
    about = {"format": "slime-flow evaluation", "version": SCHEMA_VERSION}
    with suppress(LostRaceError):
        backend.put_new(key, memoryview(serialise([rows], rows.schema, about)))


def read_eval_samples(backend: Backend, key: str, most: int) -> list[Sample]:
    """The first `most` samples of an evaluation. Raises MissingError."""
    with pa.ipc.open_file(pa.BufferReader(backend.get(key))) as file:
        return decode_samples(file.get_batch(0).slice(0, most))
