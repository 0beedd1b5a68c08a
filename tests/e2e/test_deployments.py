"""Trainings as deployments: started, watched, cancelled, retried and stopped through Prefect, with
a real server, worker and MLflow page."""

import hashlib
import json
import os
import re
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from blocks import SampleStore
from slime_core.waits import poll
from tests.e2e.runs import ROOT
from tests.e2e.services import RUN_TIMEOUT_S, SHORT, Services
from tests.s3 import BUCKET, moto_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
LONG = {**SHORT, "num_rollout": 3000}
CANCEL_S = 30.0
SECRET = "s3cret-that-nobody-may-read"
GRADER = f"""
import hashlib, os

def reward(args, sample, **kwargs):
    seen = hashlib.sha256(os.environ["JUDGE_KEY"].encode()).hexdigest()
    return float(seen == "{hashlib.sha256(SECRET.encode()).hexdigest()}")
"""


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """`slime up` in a workspace of its own; `slime down` and a look for survivors at the end."""
    made = Services(tmp_path_factory.mktemp("workspace"))
    made.slime("up", "--prefect-port", "0", "--mlflow-port", "0")
    yield made
    made.slime("down")
    assert left_of(made.workspace) == []


def left_of(workspace: Path) -> list[str]:
    """Processes that name the workspace in their command or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            told = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(workspace) in text for text in told):
            found.append(" ".join(process.cmdline()))
    return found


def family(services: Services, run_id: str) -> list[psutil.Process]:
    """The process that owns a training, and all it has started."""
    owner = psutil.Process(services.owner(run_id))
    return [owner, *owner.children(recursive=True)]


def gone(processes: list[psutil.Process], services: Services) -> None:
    _, alive = psutil.wait_procs(processes, timeout=CANCEL_S)
    assert not alive, f"{alive}\n{services.logs()}"


def test_up_shows_what_runs_and_starts_nothing_twice(services):
    again = services.slime("up")
    for name, title in (("server", "Prefect"), ("mlflow", "MLflow"), ("worker", "worker")):
        line = rf"{title} +{re.escape(services.address(name))}  runs already, process"
        assert re.search(f"{line} {services.pid(name)}", again), again
    status = services.slime("status")
    assert status.count("running") == 3 and "no run is alive" in status
    assert services.address("server") in status and "server.log" in status
    assert "MLflow" in httpx.get(services.address("mlflow"), timeout=90).text


def test_the_form_has_every_field_with_its_meaning(services):
    deployment = services.get("/deployments/name/train/quickstart")
    schema = deployment["parameter_openapi_schema"]
    lr = schema["definitions"]["TrainGroup"]["properties"]["lr"]
    assert lr["description"] == "Learning rate."
    whole = schema["definitions"]["RunConfig"]["properties"]
    assert whole["megatron"]["type"] == whole["sglang"]["type"] == "object"
    assert deployment["work_pool_name"] == "slime" and deployment["tags"] == ["slime", "train"]
    assert deployment["schedules"] == []


def test_a_deployment_trains_to_its_end(services):
    printed = services.prefect(
        *("deployment", "run", "train/quickstart", "-p", "resume=never"),
        *("-p", 'overrides={"num_rollout": 2, "lr": 1e-4, "skip_eval_before_train": true}'),
    )
    flow_run_id = re.search(r"UUID: ([0-9a-f-]{36})", printed).group(1)
    run = services.ended(flow_run_id)
    assert run["state"]["name"] == "Completed", f"{run['state']}\n{services.logs()}"
    assert run["parameters"]["overrides"]["lr"] == 1e-4
    assert run["parameters"]["resume"] == "never"
    assert services.children(flow_run_id) == {f"iteration {k:06d}": "Completed" for k in range(2)}
    assert run["name"].startswith("quickstart-") and f"run:{run['name']}" in run["tags"]
    assert services.trained(run["name"]) == 2
    with sqlite3.connect(services.workspace / "mlflow" / "mlflow.db") as database:
        names = database.execute("select name, status from runs").fetchall()
    assert (run["name"], "FINISHED") in names


def test_a_schedule_starts_a_training(services, tmp_path):
    """As docs/operating.md has it: a copy of an entry of prefect.yaml, with `schedules`."""
    project = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    [entry] = [one for one in project["deployments"] if one["entrypoint"] == "flows.train.train"]
    entry["name"] = "scheduled"
    entry["parameters"] |= {"overrides": {**SHORT, "num_rollout": 2}, "resume": "never"}
    entry["schedules"] = [
        {"cron": "0 2 * * *", "timezone": "Europe/Berlin"},
        {"interval": 15, "anchor_date": "2026-01-01T00:00:00+00:00", "timezone": "UTC"},
    ]
    file = tmp_path / "prefect.yaml"
    file.write_text(yaml.safe_dump({**project, "deployments": [entry]}))
    services.prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(file))
    deployment = services.get("/deployments/name/train/scheduled")
    [nightly, often] = sorted(
        deployment["schedules"], key=lambda one: "interval" in one["schedule"]
    )
    assert nightly["active"] and nightly["schedule"]["cron"] == "0 2 * * *"
    assert nightly["schedule"]["timezone"] == "Europe/Berlin"
    assert often["active"] and often["schedule"]["interval"] == 15

    def started():
        wanted = {"deployments": {"id": {"any_": [deployment["id"]]}}, "sort": "START_TIME_ASC",
                  "flow_runs": {"start_time": {"is_null_": False}}}  # fmt: skip
        return services.post("/flow_runs/filter", wanted) or None

    try:
        run = poll("the run of a schedule", RUN_TIMEOUT_S, started)[0]
    finally:
        services.prefect("deployment", "delete", "train/scheduled")  # and what it would start yet
    assert run["auto_scheduled"]
    ended = services.ended(run["id"])
    assert ended["state"]["name"] == "Completed", f"{ended['state']}\n{services.logs()}"
    assert services.trained(ended["name"]) == 2


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"overrides": {"lrr": 1}}, "unknown option lrr: did you mean lr?"),
        ({"config": {"run": {"num_rolout": 3}}}, "did you mean num_rollout?"),
        ({"overrides": {"store_url": "block:nowhere"}}, "block:nowhere: Prefect has no"),
    ],
)
def test_a_wrong_parameter_fails_in_a_sentence(services, parameters, sentence):
    state = services.ended(services.start(**parameters))["state"]
    assert state["type"] == "FAILED" and sentence in state["message"]


def test_cancel_retry_and_stop(services):
    flow_run_id = services.start(overrides=LONG, resume="never")
    run_id = services.training_of(flow_run_id, 2)
    processes = family(services, run_id)
    services.set_state(flow_run_id, "CANCELLING")
    gone(processes, services)
    assert services.ended(flow_run_id)["state"]["name"] == "Cancelled", services.logs()
    trained = services.trained(run_id)

    services.set_state(flow_run_id, "SCHEDULED", "AwaitingRetry")
    assert services.training_of(flow_run_id, trained + 2) == run_id
    assert services.flow_run(flow_run_id)["run_count"] == 2
    assert run_id in services.slime("status")
    printed = services.slime("stop", run_id, "--after-iteration")
    assert f"run {run_id} stopped; `slime resume {run_id} --workspace" in printed
    run = services.ended(flow_run_id, CANCEL_S)
    assert run["state"]["name"] == "Cancelled" and "slime resume" in run["state"]["message"]
    trained = services.trained(run_id)
    states = services.children(flow_run_id)
    shown = [states[f"iteration {k:06d}"] for k in range(trained)]
    assert set(shown) <= {"Completed", "Crashed"}
    assert shown.count("Crashed") <= 1, "only the one that the cancel interrupted"
    assert f"run {run_id} does not run: it has stopped already" in services.slime("stop", run_id)


def test_a_run_outlives_its_worker_and_can_still_be_cancelled(services):
    flow_run_id = services.start(overrides=LONG, resume="never")
    run_id = services.training_of(flow_run_id, 1)
    processes = family(services, run_id)
    os.kill(services.pid("worker"), signal.SIGKILL)
    services.training_of(flow_run_id, services.trained(run_id) + 3)
    assert "ended" in services.slime("status", status=3)
    assert "started" in services.slime("up")
    services.set_state(flow_run_id, "CANCELLING")
    assert services.ended(flow_run_id, CANCEL_S)["state"]["name"] == "Cancelled"
    gone(processes, services)


def test_a_worker_that_is_asked_to_end_ends_its_run_cleanly(services):
    flow_run_id = services.start(overrides=LONG, resume="never")
    run_id = services.training_of(flow_run_id, 1)
    processes = [psutil.Process(services.pid("worker")), *family(services, run_id)]
    os.kill(services.pid("worker"), signal.SIGTERM)
    state = services.ended(flow_run_id, CANCEL_S)["state"]
    assert state["name"] == "Cancelled" and "slime resume" in state["message"]
    gone(processes, services)
    services.slime("up")


def test_a_resume_in_a_terminal_stands_in_the_same_pages(services):
    flow_run_id = services.start(overrides=LONG, resume="never")
    run_id = services.training_of(flow_run_id, 1)
    services.slime("stop", run_id)
    services.ended(flow_run_id, CANCEL_S)
    printed = services.slime("resume", run_id, "--num-rollout", str(services.trained(run_id) + 1))
    assert f"resuming run {run_id}" in printed and f"run {run_id} finished" in printed
    assert services.address("server") in printed
    wanted = {"flow_runs": {"tags": {"all_": [f"run:{run_id}"]}}}
    states = [run["state"]["name"] for run in services.post("/flow_runs/filter", wanted)]
    assert sorted(states) == ["Cancelled", "Completed"]


def test_a_killed_flow_is_shown_as_crashed(services):
    flow_run_id = services.start(overrides=LONG, resume="never")
    run_id = services.training_of(flow_run_id, 1)
    processes = family(services, run_id)
    processes[0].kill()
    assert services.ended(flow_run_id, CANCEL_S)["state"]["name"] == "Crashed"
    gone(processes, services)


def test_a_run_has_its_keys_from_blocks_and_writes_them_nowhere(services):
    """The bucket's key and the grader's key stand in blocks only; the run needs both."""
    judge = services.workspace / "judge.py"
    judge.write_text(GRADER)
    with moto_server() as url:
        place = {"url": f"s3://{BUCKET}/team", "endpoint_url": url, "region": "us-east-1"}
        keys = {"access_key_id": "tester", "secret_access_key": SECRET}
        services.python(
            "from blocks import GraderSecrets, SampleStore;"
            f"GraderSecrets(entries={{'JUDGE_KEY': {SECRET!r}}}).save('judge');"
            f"store = SampleStore(**{place | keys!r}); print(store.check()); store.save('prod')"
        )
        flow_run_id = services.start(
            resume="never",
            overrides={
                **SHORT, "num_rollout": 1, "store_url": "block:prod", "rm_type": None,
                "grader_secrets": "block:judge", "custom_rm_path": f"{judge}:reward",
            },
        )  # fmt: skip
        run = services.ended(flow_run_id)
        assert run["state"]["name"] == "Completed", f"{run['state']}\n{services.logs()}"
        stored = SampleStore(**place, **keys).backend()
        batch = json.loads(stored.get(f"{run['name']}/iterations/000000/batch.json"))
        objects = {entry.key: stored.get(entry.key) for entry in stored.list()}
    assert set(batch["body"]["raw_rewards"]) == {"f:1.0"}, "the grader did not see its key"
    assert not services.workspace.joinpath("store", run["name"]).exists()
    holding = [key for key, content in objects.items() if SECRET.encode() in content]
    for path in services.workspace.rglob("*"):
        if path.is_file() and SECRET.encode() in path.read_bytes():
            holding.append(str(path))
    assert holding == []
    assert SECRET not in str(run)
    assert run["parameters"]["overrides"]["store_url"] == "block:prod"


def test_up_shows_a_run_as_crashed_that_died_with_its_worker_before_it_had_a_name(services):
    flow_run_id = services.start(overrides=LONG, resume="never")

    def running() -> bool | None:
        return services.flow_run(flow_run_id)["state"]["type"] == "RUNNING" or None

    poll("the flow run to begin", RUN_TIMEOUT_S, running, interval_s=0.05)
    worker = psutil.Process(services.pid("worker"))
    processes = [worker, *worker.children(recursive=True)]
    for process in processes[:2]:
        process.kill()
    gone(processes, services)
    run = services.flow_run(flow_run_id)
    assert run["state"]["type"] == "RUNNING", "nobody has told Prefect"
    assert f"crashed   {run['name']}, whose process is gone" in services.slime("up")
    assert services.flow_run(flow_run_id)["state"]["type"] == "CRASHED"


def state_in_the_database(services: Services, flow_run_id: str) -> str:
    """Of a flow run whose server has ended."""
    with closing(sqlite3.connect(services.workspace / "prefect" / "prefect.db")) as database:
        query = "select state_name from flow_run where id = ?"
        return database.execute(query, [flow_run_id]).fetchone()[0]


@pytest.mark.parametrize("moment", ["PENDING", "RUNNING", "lease"])
def test_down_while_a_run_is_starting_leaves_nothing_running(services, moment):
    flow_run_id = services.start(overrides=LONG, resume="never")
    before = services.owners()

    def there() -> bool | None:
        reached = services.flow_run(flow_run_id)["state"]["type"] == moment
        return reached or services.owners() > before or None

    poll(f"moment {moment} of the start", RUN_TIMEOUT_S, there, interval_s=0.05)
    printed = services.slime("down")
    state = state_in_the_database(services, flow_run_id)
    ended = [owner.with_suffix(".ended").is_file() for owner in services.owners() - before]
    # A flow that has not begun dies of the signal, and a start that takes longer than a stop may is
    # killed: the worker says so. One that ended by itself has given its lease back.
    wanted = (
        ("Cancelled", "Crashed") if not ended else ("Cancelled",) if all(ended) else ("Crashed",)
    )
    assert state in wanted, f"{state}\n{printed}\n{services.logs()}"
    assert left_of(services.workspace) == []
    assert "crashed  " not in services.slime("up")


def test_down_ends_the_run_of_the_worker_too(services):
    flow_run_id = services.start(overrides=LONG, resume="never")
    processes = family(services, services.training_of(flow_run_id, 1))
    printed = services.slime("down")
    assert "runs that the worker stops: 1" in printed and printed.count("ended") == 3
    gone(processes, services)
    assert left_of(services.workspace) == []
    assert "nothing runs" in services.slime("down")
    assert state_in_the_database(services, flow_run_id) == "Cancelled"
