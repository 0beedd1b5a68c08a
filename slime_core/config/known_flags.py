"""Every flag of slime: what became of it here. The data lies in known_flags.csv.

A row is `works` (a field of the tree or another name of one, with the test that observes its
effect), `no effect` (an option of Megatron's for what the trainer does in one way; accepted, and
the check says so), `later` (with what it waits for) or `refused` (with the reason). docs/flags.csv
shows the same with types, defaults and classes; it is made by
`python -m slime_core.config.known_flags > docs/flags.csv`.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, cast

from pydantic_core import PydanticUndefined

from slime_core.config.expected import expected
from slime_core.config.fields import OPEN_GROUPS, class_of, field_groups, field_info
from slime_core.config.parallel import LAYOUT_OPTIONS

DATA = Path(__file__).with_suffix(".csv")
COLUMNS = ("name", "type", "default", "class", "status", "where")

Status = Literal["works", "no effect", "later", "refused"]

TAKEN = ("works", "no effect")


@dataclass(frozen=True)
class KnownFlag:
    """One row.

    Attributes:
        name: as a field, without dashes; `router_*` stands for all that begin so.
        status: works, no effect, later or refused.
        field: the field of the tree, or the open group, that takes it; empty where nothing does,
            and where it says what happens anyway.
        type, default: slime's, where they do not follow from the field.
        where: the test that observes the effect; what it waits for; or why it is refused.
    """

    name: str
    status: Status
    field: str
    type: str
    default: str
    where: str

    @property
    def flag(self) -> str:
        """`--with-dashes`."""
        return "--" + self.name.replace("_", "-")


@cache
def known_flags() -> Mapping[str, KnownFlag]:
    """Name -> row."""
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = [
            KnownFlag(row["flag"], cast(Status, row["status"]), row["field"], row["type"],
                      row["default"], row["where"])
            for row in csv.DictReader(file)
        ]  # fmt: skip
    return {row.name: row for row in rows}


def why_not(name: str, shown: str | None = None) -> str | None:
    """Why a name of slime's cannot be used here, as a sentence; None for all other names.

    Args:
        name: as a field, without dashes.
        shown: how it was written; by default as a flag.
    """
    family = name.partition("_")[0] + "_*"
    row = known_flags().get(name) or known_flags().get(family)
    if row is None or row.status in TAKEN or name in field_groups():
        return None
    shown = shown or "--" + name.replace("_", "-")
    if row.status == "later":
        return f"{shown} is not there yet, it waits for: {row.where}"
    return f"{shown} is refused: {row.where}"


def table() -> list[tuple[str, ...]]:
    """The rows of docs/flags.csv, below its head."""
    return [_shown(row) for row in known_flags().values()]


def _shown(row: KnownFlag) -> tuple[str, ...]:
    kind, default, group = row.type, row.default, "-"
    if row.field in field_groups():
        info = field_info(row.field)
        kind, group = expected(info), class_of(row.field)
        default = _default(info.get_default(call_default_factory=True))
    elif row.field in OPEN_GROUPS:
        numeric = row.field == "megatron" and row.name not in LAYOUT_OPTIONS
        group = "numeric" if numeric else "operational"
    where = row.where
    if row.status in TAKEN and row.field not in ("", row.name):
        where = f"{row.field}; {where}"
    return (row.flag, kind, default, group, row.status, where)


def _default(value: object) -> str:
    return "required" if value is PydanticUndefined else "" if value is None else str(value)


def _write(rows: Iterable[tuple[str, ...]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)


if __name__ == "__main__":
    _write(table())
