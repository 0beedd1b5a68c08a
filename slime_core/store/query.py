"""SQL over what a run stores, through DuckDB (the extra `query`)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from slime_core.errors import ConfigError, StoreError
from slime_core.store import layout, tables
from slime_core.store.cache import NodeCache
from slime_core.store.documents import read_document
from slime_core.store.planes import GIVEN_UP, in_words
from slime_core.store.schema import PLANES
from slime_core.store.scores import all_scores
from slime_core.store.seal import list_dropped, list_seals
from slime_core.store.table_index import TableIndex

TABLES = {
    "iterations": "one row a trained iteration",
    "groups": "one row an attempt at a group, with the iteration that trains it",
    "samples": "one row a stored sample: every column of a part that is no list",
    "tokens": "one row a response token (name it once in a query: it is read as a stream)",
    "lost": "one row a group and plane of it (experts, media) that was given up",
    "evals": "one row a metric of an evaluation",
    "scores": "one row a sample that was graded again",
    "runs": "one row a run of the store, as `slime runs` shows them",
}
EVALS = pa.schema(
    [
        ("version", pa.string()),
        ("iteration", pa.int64()),
        ("dataset", pa.string()),
        ("metric", pa.string()),
        ("value", pa.float64()),
    ]
)
_VIEWS = (
    "CREATE VIEW groups AS SELECT t.iteration, g.* FROM stored_groups g LEFT JOIN trained t "
    "ON g.group_id = t.group_id AND g.attempt = t.attempt",
    "CREATE VIEW samples AS SELECT t.iteration, s.* FROM stored_samples s LEFT JOIN trained t "
    "ON s.group_index = t.group_id AND s.attempt = t.attempt",
    "CREATE VIEW lost AS SELECT t.iteration, l.* FROM stored_lost l LEFT JOIN trained t "
    "ON l.group_id = t.group_id AND l.attempt = t.attempt",
)


def query(cache: NodeCache, sql: str, more: Mapping[str, pa.Table] | None = None) -> pa.Table:
    """The answer to a query over the sealed segments and ledgers of a run.

    Args:
        cache: the run. With a local folder, flat tables are kept there for the next query.
        sql: one statement on TABLES. It sees neither files nor the network.
        more: tables that the run itself does not hold, such as `runs`.

    Raises:
        ConfigError: DuckDB is not installed, or the statement is wrong; says where.
    """
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError("queries need the extra: pip install 'slime-flow[query]'") from error
    index = TableIndex(cache)
    with duckdb.connect(config={"enable_external_access": "false"}) as connection:
        for name, table in {**_registered(cache, index), **(more or {})}.items():
            connection.register(name, table)
        for view in _VIEWS:
            connection.execute(view)
        try:
            kinds = [statement.type for statement in connection.extract_statements(sql)]
            if kinds != [duckdb.StatementType.SELECT]:
                raise ConfigError(f"{sql!r} is not one question: write a SELECT")
            return connection.sql(sql).to_arrow_table()
        except duckdb.CatalogException as error:
            first = str(error).splitlines()[0]
            raise ConfigError(f"{first} The tables are {', '.join(TABLES)}") from error
        except duckdb.Error as error:
            raise ConfigError(f"the query cannot be answered: {error}") from error


def export_rows(cache: NodeCache, path: Path) -> int:
    """Writes every row of every sealed segment, with all columns, to one Parquet file.

    Returns:
        How many rows.
    """
    count = 0
    try:
        with pq.ParquetWriter(path, tables.ROWS, compression="zstd") as writer:
            for segment in _with_rows(cache):
                batches = list(tables.row_batches(cache, [segment]))
                table = pa.Table.from_batches(batches, tables.ROWS)
                writer.write_table(table)
                count += table.num_rows
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}") from error
    return count


def given_up_note(cache: NodeCache, names: Collection[str]) -> str | None:
    """Says which rows or planes were given up, None where that concerns none of the names.

    Args:
        names: of tables and columns that somebody looks at.
    """
    sentences = []
    gone = list_dropped(cache.backend) if {"samples", "tokens"} & set(names) else ()
    if gone:
        sentences.append(f"the rows of segments {in_words(gone)} were given up (slime gc) and "
                         "are not here")  # fmt: skip
    concerned = {PLANES[name] for name in names if name in PLANES} & set(GIVEN_UP)
    lost = [f"{plane} of {where}" for plane, where in _where_lost(cache, concerned).items()]
    if lost:
        sentences.append(f"{' and '.join(lost)} were given up (slime gc --drop-planes), so these "
                         "columns are empty there")  # fmt: skip
    return "; ".join(sentences) or None


def _where_lost(cache: NodeCache, planes: Collection[str]) -> dict[str, str]:
    """By plane that was given up somewhere: the iterations that lack it, in words."""
    marks = _marks(cache) if planes else {}
    if not marks:
        return {}
    index = TableIndex(cache)
    rows = _lost(cache, index, _with_rows(cache), marks).to_pylist()
    trained = _trained(cache, index, _iterations(cache)["batch"]).to_pylist()
    iteration_of = {(row["group_id"], row["attempt"]): row["iteration"] for row in trained}
    found = {}
    for plane in sorted(planes):
        lost = [(row["group_id"], row["attempt"]) for row in rows if row["plane"] == plane]
        if lost:
            iterations = {iteration_of[place] for place in lost if place in iteration_of}
            found[plane] = (
                f"iterations {in_words(iterations)}" if iterations else "groups of no iteration"
            )
    return found


def write_table(table: pa.Table, path: Path) -> None:
    """Writes an answer as .parquet or .jsonl.

    Raises:
        ConfigError: another suffix.
    """
    try:
        if path.suffix == ".parquet":
            pq.write_table(table, path, compression="zstd")
        elif path.suffix == ".jsonl":
            with path.open("w", encoding="utf-8") as file:
                for row in rows_of(table):
                    file.write(f"{json.dumps(row, default=str)}\n")
        else:
            raise ConfigError(f"{path}: the name has to end with .parquet or .jsonl")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}") from error


def rows_of(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows of a table as dictionaries, a chunk at a time."""
    for batch in table.to_batches(max_chunksize=4096):
        yield from batch.to_pylist()


def _with_rows(cache: NodeCache) -> list[int]:
    """Sealed segments whose rows were not given up."""
    dropped = list_dropped(cache.backend)
    return [segment for segment in list_seals(cache.backend) if segment not in dropped]


def _lost(
    cache: NodeCache, index: TableIndex, segments: list[int], marks: dict[int, str]
) -> pa.Table:
    compacted = [segment for segment in segments if segment in marks]
    return index.table("lost", compacted, tables.lost_table, marks)


def _trained(cache: NodeCache, index: TableIndex, batches: Collection[int]) -> pa.Table:
    return index.table("trained", sorted(batches), tables.trained_table)


def _iterations(cache: NodeCache) -> dict[str, set[int]]:
    """By kind of document (batch, ledger, sync): which iterations have it."""
    found = {kind: set[int]() for kind in ("batch", "ledger", "sync")}
    for entry in cache.backend.list(layout.ITERATIONS):
        if (item := layout.parse_iteration(entry.key)) is not None:
            found[item[1]].add(item[0])
    return found


def _marks(cache: NodeCache) -> dict[int, str]:
    """By segment that was compacted: its files. Rows lose planes only by a compaction."""
    keys: dict[int, list[str]] = {}
    compacted = set()
    for entry in cache.backend.list(layout.GROUPS):
        part, compact = layout.parse_part(entry.key), layout.parse_compact(entry.key)
        if (name := part or compact) is not None:
            keys.setdefault(name.segment, []).append(entry.key)
        if compact is not None:
            compacted.add(compact.segment)
    return {segment: " ".join(keys[segment]) for segment in compacted}


def _registered(cache: NodeCache, index: TableIndex) -> dict[str, Any]:
    segments, found, marks = _with_rows(cache), _iterations(cache), _marks(cache)
    ledgers, seals = sorted(found["ledger"]), list_seals(cache.backend)
    return {
        "stored_samples": index.table("samples", segments, tables.samples_table, marks),
        "stored_lost": _lost(cache, index, segments, marks),
        "stored_groups": index.table("groups", seals, tables.groups_table),
        "trained": _trained(cache, index, found["batch"]),
        "iterations": index.table("iterations", ledgers, tables.iterations_table),
        "evals": _evaluations(cache),
        "scores": all_scores(cache),
        "tokens": pa.RecordBatchReader.from_batches(
            tables.TOKENS, tables.token_batches(cache, segments)
        ),
    }


def _evaluations(cache: NodeCache) -> pa.Table:
    rows: list[tuple[Any, ...]] = []
    for entry in cache.backend.list(layout.EVALS):
        if entry.key.endswith(".json"):
            body = read_document(cache.backend, entry.key).body
            of = (body["version"], body["iteration"], body["dataset"])
            rows += [(*of, name, float(value)) for name, value in body["metrics"].items()]
    columns = list(zip(*rows, strict=True)) or [()] * len(EVALS)
    arrays = [pa.array(c, f.type) for c, f in zip(columns, EVALS, strict=True)]
    return pa.Table.from_arrays(arrays, schema=EVALS)
