import ast
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from slime_core.run import audit as audit_module
from slime_core.run.audit import audit
from slime_core.store import layout
from slime_core.store.backend import open_backend
from slime_core.store.draws import Draw, log_draws
from tests.unit.run.simulation import DATASET_ROWS, GROUPS, run_with_deaths
from tests.unit.store.builders import draw

ITERATIONS = 4


@pytest.fixture(scope="module")
def finished():
    return run_with_deaths(ITERATIONS, [])


@pytest.fixture
def run(finished, tmp_path) -> Path:
    finished[0].dump(tmp_path)
    return tmp_path


def change(path: Path, edit) -> None:
    """Changes a document's body and signs it again."""
    document = json.loads(path.read_text())
    edit(document["body"])
    text = json.dumps(document["body"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    document["digest"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(document))


def problem(run: Path, *words: str) -> bool:
    return any(all(word in text for word in words) for text in audit(run, DATASET_ROWS).problems)


def test_it_imports_nothing_of_ours():
    tree = ast.parse(Path(audit_module.__file__).read_text())
    modules = {
        alias.name if isinstance(node, ast.Import) else node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert not any(name.startswith(("slime_core", "flows", "tasks", "blocks")) for name in modules)


def test_a_sound_run(run, finished):
    found = audit(run, DATASET_ROWS)
    assert found.sound and found.final_state == finished[1].state
    assert (found.iterations, found.trained) == (ITERATIONS, ITERATIONS * GROUPS)
    assert found.draws == found.trained + found.dropped + found.unused + found.open


def test_an_empty_run_is_sound(tmp_path):
    assert audit(tmp_path).sound


def test_a_lost_part_is_found(run):
    seal = json.loads((run / layout.seal(1)).read_text())
    (run / seal["by"]["parts"][0][0]).unlink()
    found = audit(run)
    assert found.lost and any("is gone, but a seal needs it" in text for text in found.problems)


def log_another(run: Path, drawn: Draw) -> None:
    """Logs a draw behind those that are there."""
    log_draws(open_backend(str(run)), len(list((run / "draws").iterdir())), [drawn])


def test_a_prompt_that_was_drawn_twice_is_found(run, finished):
    group = finished[1].frontier.next_group_id
    log_another(run, replace(draw(group), data_epoch=0, position=3))
    assert problem(run, "prompt (0, 3) was drawn 2 times")


def test_a_prompt_that_was_skipped_is_found(run, finished):
    group = finished[1].frontier.next_group_id
    log_another(run, draw(group + 1, rows=DATASET_ROWS))
    found = audit(run, DATASET_ROWS)
    assert divmod(group, DATASET_ROWS) in found.skipped
    assert problem(run, "group ids of the draws have a gap")


def test_a_missing_and_a_doubled_file_of_draws_are_found(run):
    (run / layout.draws(9)).write_bytes((run / layout.draws(1)).read_bytes())
    assert problem(run, "logged twice")
    (run / layout.draws(1)).unlink()
    assert problem(run, "is missing before")


def test_a_group_that_is_trained_twice_is_found(run):
    group = json.loads((run / layout.batch(1)).read_text())["body"]["groups"][0]
    change(run / layout.batch(3), lambda body: body["groups"].append(group))
    found = audit(run)
    assert found.doubled == [group[0]]
    assert problem(run, f"group {group[0]} is in batches 1 and 3")
    assert problem(run, "000003/ledger.json was trained on another batch")


@pytest.mark.parametrize(
    ("key", "edit", "words"),
    [
        (layout.batch(1), lambda b: b["groups"][0].__setitem__(1, 9), ("that were not sealed",)),
        (layout.batch(1), lambda b: b["seals"].update({"1": "x"}), ("seal of segment 1",)),
        (layout.seal(1), lambda b: b.update(parent=""), ("seal.json does not follow",)),
        (layout.seal(1), lambda b: b["groups"][0].__setitem__(0, 999), ("never drawn",)),
        (layout.ledger(1), lambda b: b.update(state="x"), ("has a state that does not follow",)),
        (layout.ledger(1), lambda b: b.update(parent="x"), ("does not follow the entry before",)),
    ],
)
def test_documents_that_contradict_each_other_are_found(run, key, edit, words):
    change(run / key, edit)
    assert problem(run, *words)


def test_a_document_that_was_changed_is_found(run):
    path = run / layout.ledger(2)
    path.write_text(path.read_text().replace('"weight_version":"a-3"', '"weight_version":"a-4"'))
    assert problem(run, "000002/ledger.json does not have the digest it names")


def test_a_missing_ledger_is_found(run):
    (run / layout.ledger(1)).unlink()
    assert problem(run, "the ledger of iteration 1 is missing")
    assert problem(run, "iteration 1 has no ledger, but the next one has")


def test_a_run_that_was_cut_off_is_sound(finished, tmp_path):
    backend = finished[0]
    keys = list(backend._objects)
    for entry in backend.list():
        if entry.key in keys[: len(keys) // 2]:
            path = tmp_path / entry.key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(backend.get(entry.key))
    found = audit(tmp_path, DATASET_ROWS)
    assert found.sound and 0 < found.iterations < ITERATIONS
