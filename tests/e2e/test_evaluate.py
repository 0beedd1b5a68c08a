"""`slime eval` and the deployment evaluate/quickstart, on a run and on a model."""

import json
import sqlite3
from contextlib import closing

import psutil
import pytest

from slime_core.store.backend import open_backend
from slime_core.store.documents import read_document
from tests.e2e.runs import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
MODEL, HELDOUT = (
    str(ROOT / "configs" / "quickstart" / name) for name in ("model", "heldout.jsonl")
)
DATA = ("--eval-prompt-data", "held", f"{HELDOUT}@[0:64]", "--label-key", "label")
GREEDY = (*DATA, "--rm-type", "exact_match", "--eval-temperature", "0")


@pytest.fixture(scope="module")
def run_id(services):
    """A finished run of three iterations, whose last weights were evaluated."""
    few = {"num_rollout": 3, "eval_interval": 3, "skip_eval_before_train": True}
    ended = services.ended(services.start(overrides=few, resume="never"))
    assert ended["state"]["name"] == "Completed", f"{ended['state']}\n{services.logs()}"
    return ended["name"]


def rows(printed: str) -> dict[str, dict]:
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {row["dataset"]: row for row in found}


def curves(services, run: str) -> dict[str, list[tuple[int, float]]]:
    query = """
      select m.key, m.step, m.value from metrics m join runs r on r.run_uuid = m.run_uuid
      where r.name = ? and m.key like 'eval/%' order by m.key, m.step
    """
    found: dict[str, list[tuple[int, float]]] = {}
    with closing(sqlite3.connect(services.workspace / "mlflow" / "mlflow.db")) as database:
        for key, step, value in database.execute(query, [run]):
            found.setdefault(key, []).append((step, value))
    return found


def test_a_deployment_evaluates_what_the_store_lacks(services, run_id):
    deployment = services.get("/deployments/name/evaluate/quickstart")
    assert deployment["tags"] == ["slime", "evaluate"]
    more = {"eval_config": {"datasets": [{"name": "again", "path": HELDOUT, "temperature": 0.0}]}}
    content = {"parameters": {"overrides": more}, "state": {"type": "SCHEDULED"}}
    path = f"/deployments/{deployment['id']}/create_flow_run"
    ended = services.ended(services.post(path, content)["id"])
    assert ended["state"]["name"] == "Completed", f"{ended['state']}\n{services.logs()}"
    assert ended["name"] == f"evaluate {run_id} l0-3"
    assert services.tasks(ended["id"], 3) == {"weights", "engines", "evaluate again"}
    [table] = services.post(
        "/artifacts/filter", {"artifacts": {"key": {"any_": [f"evaluation-{run_id}"]}}}
    )
    store = open_backend(str(services.workspace / "store" / run_id))
    own, again = (read_document(store, f"evals/l0-3/{name}.json").body["metrics"]
                  for name in ("greedy", "again"))  # fmt: skip
    assert again == own, "the run's own evaluation of the same prompts at temperature 0"
    assert f"| again | {own['reward']:.6g} |" in table["data"]
    found = curves(services, run_id)
    assert found["eval/again"] == found["eval/greedy"] == [(3, own["reward"])]


def test_a_wrong_parameter_fails_in_a_sentence(services, run_id):
    deployment = services.get("/deployments/name/evaluate/quickstart")
    content = {"parameters": {"version": 9}, "state": {"type": "SCHEDULED"}}
    path = f"/deployments/{deployment['id']}/create_flow_run"
    state = services.ended(services.post(path, content)["id"])["state"]
    assert state["type"] == "FAILED"
    assert f"run {run_id} has no version 9: it has the weights after 0 to 3" in state["message"]


def test_the_command_makes_weights_between_checkpoints_and_stores_once(services, run_id):
    first = services.slime("eval", "last", "--version", "2", "--json", *GREEDY)
    assert rows(first)["held"]["version"] == "l0-2" and "evaluating held" in first
    again = services.slime("eval", run_id, "--version", "l0-2", "--json", *GREEDY)
    assert rows(again) == rows(first) and "evaluating" not in again
    assert curves(services, run_id)["eval/held"] == [(2, rows(first)["held"]["reward"])]
    changed = services.slime("eval", run_id, "--version", "2", *GREEDY, "--seed", "5", status=2)
    assert "made with other settings" in changed and "another name" in changed
    flows = services.post("/flow_runs/filter", {"flow_runs": {"name": {"like_": "evaluate %"}}})
    assert {run["name"] for run in flows} >= {f"evaluate {run_id} l0-2"}


def test_a_model_is_evaluated_the_same_each_time(services, tmp_path):
    flags = (*GREEDY, "--eval-max-response-len", "6", "--no-prefect")
    shown = services.slime("eval", MODEL, *flags)
    assert "dataset" in shown and "held" in shown and "stored" in shown
    other = services.slime("eval", MODEL, *flags, "--store-url", str(tmp_path / "other"), "--json")
    [stored] = (services.workspace / "store").glob("model-*/evals/*/held.json")
    [twin] = (tmp_path / "other").glob("model-*/evals/*/held.json")
    assert json.loads(stored.read_text())["body"] == json.loads(twin.read_text())["body"]
    row = rows(other)["held"]
    assert curves(services, row["target"])["eval/held"] == [(0, row["reward"])]
    # Of a process that just ends there is no command: whose it was, it is not left.
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    of_workspace = [one for one in commands if str(services.workspace) in " ".join(one)]
    assert [one for one in of_workspace if "slime_core.engines.embedded" in one] == []
