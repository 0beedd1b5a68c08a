"""`slime export RUN FILE.parquet`: every column of every sealed row, as Parquet."""

from __future__ import annotations

import sys
from pathlib import Path

from flows.cli.stored import open_run, parser, show
from slime_core.config.flags import parse
from slime_core.errors import ConfigError
from slime_core.store.query import export_rows, given_up_note
from slime_core.store.tables import ROWS


def main(arguments: list[str]) -> int:
    """Writes the file."""
    made = parser("export", __doc__)
    made.add_argument("file", type=Path, metavar="FILE.parquet", help="where to write")
    options = parse(made, arguments)
    if options.file.suffix != ".parquet":
        raise ConfigError(f"{options.file}: the name has to end with .parquet")
    run_id, cache = open_run(options)
    count = export_rows(cache, options.file)
    if (note := given_up_note(cache, ["samples", *ROWS.names])) is not None:
        print(f"note: {note}", file=sys.stderr)
    size = options.file.stat().st_size
    show([{"run": run_id, "rows": count, "bytes": size, "file": options.file}], options.json)
    return 0
