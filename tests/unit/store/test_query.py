"""SQL over stored runs: answers agree with the rows, also after they were kept once."""

import sys

import pyarrow.parquet as pq
import pytest

from slime_core.errors import ConfigError
from slime_core.store import tables
from slime_core.store.cache import NodeCache
from slime_core.store.codec import decode_samples
from slime_core.store.documents import put_document
from slime_core.store.layout import evaluation
from slime_core.store.query import export_rows, query, write_table
from slime_core.store.table_index import STRETCH, TableIndex
from tests.unit.store.builders import finished_sample, group_rows, run_iteration, write_groups
from tests.unit.store.runs import stored_run

SAMPLES = [(group, i) for group in range(6) for i in range(4)]


@pytest.fixture
def cache(tmp_path):
    return NodeCache(stored_run(tmp_path / "store", "sorting", 3), tmp_path / "cache")


@pytest.fixture(params=[1, 2], ids=["first", "again"])
def ask(cache, request):
    """Answers of a first query, and of one that finds its tables kept."""

    def answer(sql: str) -> list[dict]:
        for _ in range(request.param):
            rows = query(cache, sql).to_pylist()
        return rows

    return answer


def test_rewards_by_iteration(ask):
    rows = ask("SELECT iteration, count(*) n, avg(reward) r FROM samples GROUP BY 1 ORDER BY 1")
    assert rows == [{"iteration": k, "n": 8, "r": 0.5} for k in range(3)]


def test_tokens_are_those_of_the_samples(ask):
    rows = ask("SELECT group_id, sample, place, token, log_prob, trained FROM tokens ORDER BY ALL")
    wanted = [
        (group, i, place, token, log_prob, True)
        for group, i in SAMPLES
        for place, (token, log_prob) in enumerate(
            zip(
                finished_sample(group, i).tokens[3:],
                finished_sample(group, i).rollout_log_probs or [],
                strict=True,
            )
        )
    ]
    assert [tuple(row.values()) for row in rows] == wanted


def test_iterations_groups_and_evaluations(cache):
    body = {"version": "a-3", "iteration": 2, "dataset": "greedy", "metrics": {"pass@1": 0.25}}
    put_document(cache.backend, evaluation("a-3", "greedy"), body)
    (last,) = query(cache, "SELECT * FROM iterations WHERE iteration = 2").to_pylist()
    assert (last["groups"], last["rows"], last["loss"], last["skipped"]) == (2, 8, 0.25, 0)
    assert last["weight_version"] == "a-3" and last["reward"] == 1.0
    assert query(cache, "SELECT count(*) n, sum(rows) r FROM groups").to_pylist() == [
        {"n": 6, "r": 24}
    ]
    assert query(cache, "SELECT * FROM evals").to_pylist() == [
        {"version": "a-3", "iteration": 2, "dataset": "greedy", "metric": "pass@1", "value": 0.25}
    ]


def test_rows_that_no_seal_lists_do_not_count(cache):
    write_groups(cache.backend, 2, [group_rows(4)], epoch=7)
    write_groups(cache.backend, 3, [group_rows(6)])
    assert query(cache, "SELECT count(*) n FROM samples").to_pylist() == [{"n": 24}]


def test_a_run_that_goes_on_and_one_made_anew(tmp_path):
    store = tmp_path / "store"
    run = stored_run(store, "a", 1, created="2026-01-01")
    cache = NodeCache(run, tmp_path / "cache")
    count = "SELECT count(*) n FROM samples"
    assert query(cache, count).to_pylist() == [{"n": 8}]
    run_iteration(run, 1, "s", "p")
    assert query(cache, count).to_pylist() == [{"n": 16}]
    for entry in run.list():
        run.delete(entry.key)
    (store / "runs" / "a.json").unlink()
    again = NodeCache(stored_run(store, "a", 0, created="2026-01-02"), tmp_path / "cache")
    assert query(again, count).to_pylist() == [{"n": 0}]


def test_full_stretches_become_one_table(cache):
    index, numbers = TableIndex(cache), list(range(STRETCH + 1))
    made: list[int] = []

    def build(_, members):
        made.extend(members)
        return tables._table([(n, n, 0, n) for n in members], tables.TRAINED)

    for upto in (3, STRETCH, STRETCH + 1, STRETCH + 1):
        table = index.table("t", numbers[:upto], build)
        assert table["iteration"].to_pylist() == numbers[:upto]
    assert made == [0, 1, 2, *range(STRETCH), STRETCH], "what was kept is not made again"
    files = sorted(path.name for path in cache.directory.rglob("t-*"))
    assert files == [f"t-{STRETCH:06d}.arrow", "t-x000000.arrow"]
    next(cache.directory.rglob("t-x*")).write_bytes(b"half")
    assert index.table("t", numbers, build).num_rows == STRETCH + 1


def test_every_row_goes_through_parquet_without_loss(cache, tmp_path):
    assert export_rows(cache, tmp_path / "rows.parquet") == 24
    table = pq.read_table(tmp_path / "rows.parquet")
    found = decode_samples(table.cast(tables.ROWS))
    stored = [s for k in range(3) for b in tables.sealed_rows(cache, k) for s in b.to_samples()]
    assert found == stored and len(found[0].tokens) > 3


def test_answers_can_be_written(cache, tmp_path):
    answer = query(cache, "SELECT group_index, reward FROM samples ORDER BY ALL LIMIT 2")
    write_table(answer, tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == answer.to_pylist()
    write_table(answer, tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert lines[0] == '{"group_index": 0, "reward": 0.0}' and len(lines) == 2
    with pytest.raises(ConfigError, match=r"has to end with \.parquet or \.jsonl"):
        write_table(answer, tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT nothing FROM samples", "nothing"),
        ("SELEC 1", "syntax"),
        ("SELECT * FROM nosuch", "nosuch .*The tables are iterations, "),
        ("SELECT * FROM read_csv('/etc/hostname')", "disabled"),
        ("COPY samples TO '/tmp/x.csv'", "write a SELECT"),
        ("SELECT 1; SELECT 2", "not one question"),
        ("CREATE TABLE x (a INT)", "write a SELECT"),
    ],
)
def test_what_cannot_be_answered_says_why(cache, sql, message):
    with pytest.raises(ConfigError, match=f"(?s).*{message}"):
        query(cache, sql)


def test_without_duckdb(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ConfigError, match=r"pip install 'slime-flow\[query\]'"):
        query(cache, "SELECT 1")


def test_without_a_folder_nothing_is_kept(tmp_path):
    run = stored_run(tmp_path / "store", "a", 1)
    assert query(NodeCache(run), "SELECT count(*) n FROM samples").to_pylist() == [{"n": 8}]
    assert not (tmp_path / "cache").exists()
