"""Planes: columns of a row that are given up together, once nothing that a run does needs them.

The digest that a seal names covers every column. A file whose rows lost a plane therefore says for
each of these groups which planes went and the digest of what is left; the sealed digest was checked
before they went.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow as pa

from slime_core.errors import ConfigError, DataError
from slime_core.store.schema import PLANES

GIVEN_UP = ("experts", "media")
"""Planes that no resume reads: only rows whose training is in two checkpoints give them up. A
replay reads experts with use_rollout_routing_replay, and refuses rows without them."""


def checked(names: Sequence[str]) -> frozenset[str]:
    """The named planes. Raises ConfigError for one that cannot be given up."""
    wrong = [name for name in names if name not in GIVEN_UP]
    if wrong:
        raise ConfigError(f"plane {wrong[0]!r} cannot be given up: name {' or '.join(GIVEN_UP)}")
    return frozenset(names)


def without(rows: pa.RecordBatch, planes: Collection[str]) -> tuple[pa.RecordBatch, frozenset[str]]:
    """The rows with nothing in the columns of `planes`, and those planes that held something."""
    columns, held = list(rows.columns), set[str]()
    for i, field in enumerate(rows.schema):
        plane = PLANES.get(field.name, "")
        if plane in planes and columns[i].null_count < rows.num_rows:
            held.add(plane)
            columns[i] = pa.nulls(rows.num_rows, field.type)
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema), frozenset(held)


def in_words(numbers: Collection[int]) -> str:
    """Such as `0 to 5, 8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def refuse_lost(lost: Collection[str], spared: Collection[str]) -> None:
    """Raises DataError where samples would lack a plane that their reader needs.

    Args:
        lost: planes that rows had and that were given up.
        spared: planes that the reader does not need.
    """
    missing = sorted(set(lost) - set(spared))
    if missing:
        raise DataError(
            f"these samples had {' and '.join(missing)}, which were given up (slime gc "
            "--drop-planes): what needs whole samples cannot be done with them any more"
        )
