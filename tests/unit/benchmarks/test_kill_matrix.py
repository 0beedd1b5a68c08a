"""The kill matrix's auditor finds every fault that it is there to find."""

from __future__ import annotations

import ast
import hashlib
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_matrix import audit_databases, audit_store
from benchmarks.kill_matrix.audit_databases import (
    audit_metrics_file,
    audit_mlflow,
    audit_prefect,
)
from benchmarks.kill_matrix.audit_store import acknowledged, differences
from benchmarks.kill_matrix.cases import (
    BOUNDARIES,
    ITERATIONS,
    MOST_KILLS,
    VICTIMS,
    boundary_cases,
    random_cases,
)
from slime_core.store.backend import Backend, open_backend
from slime_core.store.batch import put_batch
from slime_core.store.draws import log_draws
from slime_core.store.ledger import put_ledger, put_sync
from tests.unit.store.builders import (
    FakeOwner,
    batch_content,
    draw,
    group_rows,
    seal_segment,
    write_groups,
)

TRAINED, DATASET_ROWS = 3, 4  # 3 iterations of 2 groups: a data epoch ends
EVALUATED = {0, 3}


def iteration(store: Backend, k: int, parent: tuple[str, str]) -> tuple[str, str]:
    """Trains one iteration; returns its state and the digest of its seal."""
    groups = (2 * k, 2 * k + 1)
    assert log_draws(store, k, [draw(group, k, DATASET_ROWS) for group in groups]) is None
    for seq, group in enumerate(groups):
        write_groups(store, k, [group_rows(group)], seq=seq)
    seal = seal_segment(store, k, parent[1])
    batch = put_batch(store, FakeOwner(), batch_content(k, seal))
    step = {"loss": 0.0, "grad_norm": 0.5 + k, "skipped": False, "weights_digest": f"actor:{k}"}
    ledger = put_ledger(
        store, FakeOwner(), iteration=k, parent=parent[0], batch_digest=batch.digest,
        numeric_digest="n", weight_version=f"l0-{k + 1}", result={"steps": [step], "metrics": {}},
    )  # fmt: skip
    put_sync(store, k, f"l0-{k + 1}")
    return ledger.state, seal.digest


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    parent = ("initial", "")
    for k in range(TRAINED):
        parent = iteration(open_backend(str(folder)), k, parent)
    return folder


def problems(run: Path, seen: list[audit_store.Acknowledged] | None = None) -> str:
    return "\n".join(audit_store.audit_store(run, DATASET_ROWS, TRAINED, seen or []).problems)


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes a document's body and signs it again."""
    document = json.loads(path.read_text())
    edit(document["body"])
    text = json.dumps(document["body"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    document["digest"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("module", [audit_store, audit_databases])
def test_it_imports_nothing_of_ours(module):
    nodes = ast.walk(ast.parse(Path(module.__file__).read_text()))
    names = [
        alias.name if isinstance(node, ast.Import) else node.module or ""
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    assert {name.split(".")[0] for name in names} <= {
        "__future__", "collections", "contextlib", "dataclasses", "hashlib", "json", "math",
        "pathlib", "pyarrow", "sqlite3", "typing",
    }  # fmt: skip


def test_a_sound_run_has_no_problems(run: Path):
    assert problems(run, [acknowledged(run)]) == ""
    assert len(acknowledged(run)) == 2 * TRAINED
    audit = audit_store.audit_store(run, DATASET_ROWS, TRAINED)
    assert audit.final_weights == "actor:2"


def test_a_finished_group_that_is_gone(run: Path):
    seen = acknowledged(run)
    next((run / "groups/000001").glob("*-000001-*.arrow")).unlink()
    assert "group 3 is lost: a seal names it" in problems(run)
    assert "group 3 is lost: it stood in 000001/" in problems(run, [seen])


def test_a_finished_group_that_was_generated_again(run: Path):
    write_groups(open_backend(str(run)), 1, [group_rows(2)], epoch=1, seq=7)
    assert "group 2 was generated again although finished" in problems(run)


def test_another_attempt_than_what_was_finished_at_a_kill(run: Path):
    seen = acknowledged(run)
    change(run / "groups/000002/seal.json", lambda body: body["groups"][0].__setitem__(1, 5))
    assert "group 4 was finished at a kill, another attempt is sealed" in problems(run, [seen])


def test_a_group_that_is_trained_twice(run: Path):
    group = json.loads((run / "iterations/000000/batch.json").read_text())["body"]["groups"][0]
    change(run / "iterations/000002/batch.json", lambda body: body["groups"].append(group))
    assert "group 0 is trained twice, in iterations 0 and 2" in problems(run)


def test_a_group_that_is_never_trained(run: Path):
    change(run / "iterations/000001/batch.json", lambda body: body["groups"].pop())
    assert "group 3 is lost: it is finished and was not trained" in problems(run)


def test_other_rows_than_the_sealed_ones(run: Path):
    edit = lambda body: body["groups"][0].__setitem__(4, "other")  # noqa: E731
    change(run / "iterations/000001/batch.json", edit)
    assert "iteration 1 trains other rows of group 2" in problems(run)


def test_a_prompt_that_is_skipped_and_one_that_is_drawn_twice(run: Path):
    (run / "draws/000001.arrow").unlink()
    assert "draws 000001 are missing" in problems(run)
    assert "prompt (0, 2) is skipped" in problems(run)
    log_draws(open_backend(str(run)), 3, [draw(1, 3, DATASET_ROWS)])
    assert "group 1 is drawn twice" in problems(run)


def test_the_same_prompt_under_two_group_ids(run: Path):
    log_draws(open_backend(str(run)), 3, [draw(6, 3, rows=6)])  # position 0 of data epoch 1 again
    assert "prompt (1, 0) is drawn 2 times" in problems(run)


def test_a_broken_chain_of_ledgers(run: Path):
    change(run / "iterations/000001/ledger.json", lambda body: body.update(parent="else"))
    assert "ledger 1 does not follow the one before" in problems(run)
    assert "ledger 1 has a state that does not follow" in problems(run)
    change(run / "iterations/000002/ledger.json", lambda body: body.update(batch="else"))
    assert "ledger 2 was trained on another batch" in problems(run)


def test_missing_iterations_and_syncs(run: Path):
    (run / "iterations/000001/sync.json").unlink()
    (run / "iterations/000002/ledger.json").unlink()
    assert "the weights after iteration 1 were not published" in problems(run)
    assert "iteration 2 was not trained" in problems(run)


def test_a_document_that_was_changed(run: Path):
    path = run / "groups/000000/seal.json"
    path.write_text(path.read_text().replace('"kept"', '"spare"', 1))
    assert "000000/seal.json does not have the digest it names" in problems(run)


def test_differences_from_the_untouched_run(run: Path, tmp_path: Path):
    other = tmp_path / "other"
    parent = ("initial", "")
    for k in range(TRAINED):
        parent = iteration(open_backend(str(other)), k, parent)
    assert differences(run, other) == []
    change(run / "iterations/000002/ledger.json", lambda body: body.update(weight_version="l1-3"))
    (run / "iterations/000001/sync.json").unlink()
    assert differences(run, other) == [
        "iterations/000001/sync.json is only in the untouched run",
        "iterations/000002/ledger.json differs from the untouched run's in weight_version",
    ]
    assert differences(other, run)[0] == "iterations/000001/sync.json is not in the untouched run"


def database(path: Path, **tables: list[tuple[Any, ...]]) -> Path:
    """A database with the columns that the auditor reads."""
    columns = {
        "flow_run": "name, state_type, parent_task_run_id",
        "task_run": "name, state_type",
        "runs": "run_uuid, status",
        "tags": "run_uuid, key, value",
        "metrics": "key, step, value",
    }
    with closing(sqlite3.connect(path)) as made:
        for table, rows in tables.items():
            made.execute(f"CREATE TABLE {table} ({columns[table]})")
            marks = ", ".join("?" * len(columns[table].split(",")))
            made.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        made.commit()
    return path


def test_prefect_shows_one_completed_run(tmp_path: Path):
    good = [("it", "CRASHED", None), ("it", "COMPLETED", None), ("iteration 0", "FAILED", "t")]
    tasks = [("train 0", "COMPLETED")]
    assert audit_prefect(database(tmp_path / "1", flow_run=good, task_run=tasks), "it") == []
    bad = [("it", "RUNNING", None), ("iteration 0", "PENDING", "t")]
    tasks = [("train 0", "RUNNING")]
    assert audit_prefect(database(tmp_path / "2", flow_run=bad, task_run=tasks), "it") == [
        "Prefect shows it as RUNNING for ever",
        "Prefect shows iteration 0 as PENDING for ever",
        "Prefect shows train 0 as RUNNING for ever",
        "Prefect shows 0 completed flow runs, not 1",
    ]


def metrics() -> list[tuple[str, int, float]]:
    rows = [
        (key, k, 0.5 + k)
        for key in ("progress/iteration", "train/loss", "train/grad_norm", "rollout/raw_reward")
        for k in range(TRAINED)
    ]
    return [*rows, *(("eval/greedy", version, 1.0) for version in EVALUATED)]


def mlflow(run: Path, rows: list[tuple[str, int, float]], status: str = "FINISHED") -> str:
    path = run.parent / "mlflow.db"
    path.unlink(missing_ok=True)
    tags = [("u", "slime.run_id", "it"), ("u", "mlflow.runName", "it")]
    database(path, runs=[("u", status)], tags=tags, metrics=rows)
    return "\n".join(audit_mlflow(path, run, "it", TRAINED, EVALUATED))


def test_mlflow_has_each_number_once(run: Path):
    assert mlflow(run, metrics()) == ""
    assert "not one that is FINISHED" in mlflow(run, metrics(), "RUNNING")
    doubled = [*metrics(), ("train/loss", 1, 7.0)]
    assert mlflow(run, doubled) == "MLflow has train/loss of step 1 2 times"
    lacking = [row for row in metrics() if row[:2] not in [("train/loss", 2), ("eval/greedy", 3)]]
    assert "MLflow has train/loss of the steps [0, 1]" in mlflow(run, lacking)
    assert "MLflow has eval/greedy of the versions [0]" in mlflow(run, lacking)
    other = [(key, step, 9.0 if key == "train/grad_norm" else v) for key, step, v in metrics()]
    assert "MLflow says grad_norm 9.0 of iteration 1, its ledger 1.5" in mlflow(run, other)


def test_a_record_that_stands_in_the_metrics_file_twice(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"key": "iterations/000000"}\n{"key": "iterations/000001"}\n')
    assert audit_metrics_file(path) == []
    path.write_text(path.read_text() + '{"key": "iterations/000001"}\n')
    assert audit_metrics_file(path) == ["metrics.jsonl has iterations/000001 2 times"]


def test_the_matrix_has_every_boundary_with_every_victim():
    cases = boundary_cases()
    pairs = {(case.name.rsplit("-", 1)[0], case.kills[0].victim) for case in cases}
    assert pairs == {(boundary, victim) for boundary in BOUNDARIES for victim in VICTIMS}
    for boundary in BOUNDARIES:
        stores = {case.store for case in cases if case.name.startswith(f"{boundary}-")}
        assert stores == {"file", "s3"}, boundary
    assert len(cases) + len(random_cases(1)) == 62
    assert len({case.name for case in [*cases, *random_cases(1)]}) == 62


def test_random_cases_are_the_seed_s(seed: int = 5):
    assert random_cases(seed) == random_cases(seed) != random_cases(seed + 1)
    for case in random_cases(seed, 200):
        assert 1 <= len(case.kills) <= MOST_KILLS
        after = [kill.after for kill in case.kills if kill.after is not None]
        assert after == sorted(set(after)) and all(k <= ITERATIONS - 2 for k in after)
