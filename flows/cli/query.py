"""`slime query RUN "SELECT ..."`: SQL over what a run stores."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from flows.cli.stored import open_root, open_run, parser, root_url, show
from slime_core.config.flags import FlagParser, parse
from slime_core.run.overview import runs_table
from slime_core.store.query import TABLES, given_up_note, query, rows_of, write_table

SHOWN_ROWS = 200


def main(arguments: list[str]) -> int:
    """Prints the answer, or writes it to a file."""
    options = parse(_parser(), arguments)
    _, cache = open_run(options)
    more = {}
    if re.search(r"\bruns\b", options.sql, re.IGNORECASE):  # it looks at every run of the store
        more["runs"] = runs_table(open_root(options), root_url(options))
    answer = query(cache, options.sql, more)
    named = {*re.findall(r"\w+", options.sql.lower()), *answer.schema.names}
    if (note := given_up_note(cache, named)) is not None:
        print(f"note: {note}", file=sys.stderr)
    if options.to is not None:
        write_table(answer, options.to)
        print(f"{answer.num_rows} rows in {options.to}")
        return 0
    shown = answer if options.json else answer.slice(0, SHOWN_ROWS)
    show(list(rows_of(shown)), options.json)
    if shown.num_rows < answer.num_rows:
        print(f"... {answer.num_rows} rows in all; --to FILE.parquet or --json gives every one")
    return 0


def _parser() -> FlagParser:
    made = parser("query", __doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.epilog = "tables:\n" + "\n".join(f"  {name:<11} {text}" for name, text in TABLES.items())
    made.add_argument("sql", metavar="SELECT", help="one statement")
    made.add_argument("--to", type=Path, metavar="FILE", help="write a .parquet or .jsonl instead")
    return made
