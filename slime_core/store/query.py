"""SQL over what a run stores, through DuckDB (the extra `query`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from slime_core.errors import ConfigError, StoreError
from slime_core.store import layout, tables
from slime_core.store.cache import NodeCache
from slime_core.store.documents import read_document
from slime_core.store.scores import all_scores
from slime_core.store.seal import list_dropped, list_seals
from slime_core.store.table_index import TableIndex

TABLES = {
    "iterations": "one row a trained iteration",
    "groups": "one row an attempt at a group, with the iteration that trains it",
    "samples": "one row a stored sample: every column of a part that is no list",
    "tokens": "one row a response token (name it once in a query: it is read as a stream)",
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


def _registered(cache: NodeCache, index: TableIndex) -> dict[str, Any]:
    segments = _with_rows(cache)
    parsed = [layout.parse_iteration(e.key) for e in cache.backend.list(layout.ITERATIONS)]
    found = {kind: set[int]() for kind in ("batch", "ledger", "sync")}
    for item in parsed:
        if item is not None:
            found[item[1]].add(item[0])
    batches, ledgers = sorted(found["batch"]), sorted(found["ledger"])
    return {
        "stored_samples": index.table("samples", segments, tables.samples_table),
        "stored_groups": index.table("groups", list_seals(cache.backend), tables.groups_table),
        "trained": index.table("trained", batches, tables.trained_table),
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
