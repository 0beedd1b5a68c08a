"""What a run shows in Prefect beside flows and tasks: logs, artifacts, events, and for how long."""

import asyncio
import sqlite3
from contextlib import closing
from datetime import timedelta

import httpx
import pytest
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas import filters
from prefect.events.actions import DoNothing
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.worker import EventsWorker

from flows.pages import artifacts, retention
from flows.pages.retention import OtherServer, OwnDatabase
from slime_core.waits import poll
from tests.integration.flows.standin import StandIn
from tests.integration.flows.test_train import children_of, flow_runs_of, read

LINE = "2026-11-30 00:00:00,{:03d} {} slime_core.cluster: {}\n"


def artifacts_of(key: str):
    condition = filters.ArtifactFilter(key=filters.ArtifactFilterKey(any_=[key]))
    found = read("read_artifacts", artifact_filter=condition)
    return sorted(found, key=lambda artifact: artifact.created)


def events_of(server, run_id: str, count: int):
    """All events of a run, once the server has written that many."""
    EventsWorker.drain_all(timeout=180)
    of_run = {"event": {"prefix": ["slime."]}, "resource": {"id": [f"slime.run.{run_id}"]}}

    def look():
        answer = httpx.post(f"{server.api_url}/events/filter", json={"filter": of_run}, timeout=90)
        found = answer.raise_for_status().json()["events"]
        return found if len(found) >= count else None

    return poll(f"{count} events of {run_id}", 30, look, interval_s=0.3)


def test_artifacts_show_numbers_progress_and_the_end(server, tmp_path):
    StandIn(tmp_path, "Run.With_Odd-Name").train()
    tables = artifacts_of("iteration-run-with-odd-name")
    assert len(tables) == 3
    assert all("| train/loss | 0.5 | loss |" in table.data for table in tables)
    [parent] = flow_runs_of("Run.With_Odd-Name")
    assert [table.flow_run_id for table in tables] == [run.id for run in children_of(parent)]
    [progress] = artifacts_of("progress-run-with-odd-name")
    assert progress.type == "progress" and progress.data == 100.0
    [summary] = artifacts_of("summary-run-with-odd-name")
    assert "finished after 3 iterations" in summary.data
    assert f"`{tmp_path}/store/Run.With_Odd-Name`" in summary.data
    assert "| rollout/raw_reward |" in summary.data


def test_log_files_of_the_run_reach_its_log_within_bounds(server, tmp_path):
    logs = tmp_path / "local" / "run-lines" / "logs"
    logs.mkdir(parents=True)
    flood = "".join(LINE.format(i, "INFO", f"line {i}") for i in range(900))
    text = LINE.format(1, "DEBUG", "hidden") + flood + LINE.format(999, "ERROR", "it broke")
    (logs / "trainer-0.log").write_text(f"{text}Traceback\n  ValueError: why\n")
    (logs / "driver.log").write_text(LINE.format(1, "INFO", "comes from the flow itself"))
    StandIn(tmp_path, "run-lines", num_rollout=1, changes={"ui_log_lines_per_s": 10}).train()
    [parent] = flow_runs_of("run-lines")
    of_run = filters.LogFilter(flow_run_id=filters.LogFilterFlowRunId(any_=[parent.id]))
    found = {line.message: line for line in read("read_logs", log_filter=of_run, limit=200)}
    assert "hidden" not in found and "comes from the flow itself" not in found
    broken = found["it broke\nTraceback\n  ValueError: why"]
    assert broken.level == 40 and broken.name == "trainer-0 slime_core.cluster"
    shown = [message for message in found if message.startswith("line ")]
    assert 10 <= len(shown) <= 60
    [note] = [message for message in found if "further lines" in message]
    assert int(note.split()[0]) == 901 - len(shown) - 1 and str(logs) in note


def test_what_cannot_be_shown_is_said_once_and_the_next_is_shown(
    server, tmp_path, monkeypatch, caplog
):
    plain = artifacts.iteration_text

    def broken(k, metrics, samples):
        if k < 2:
            raise KeyError("a metric that nobody foresaw")
        return plain(k, metrics, samples)

    monkeypatch.setattr(artifacts, "iteration_text", broken)
    StandIn(tmp_path, "run-broken-page").train()
    [table] = artifacts_of("iteration-run-broken-page")
    assert "# iteration 000002" in table.data
    assert len(artifacts_of("summary-run-broken-page")) == 1
    said = [record.getMessage() for record in caplog.records]
    assert said.count("the iteration of the run cannot be shown in Prefect") == 1
    assert "not shown in Prefect: iteration: KeyError, 2 times" in said


@pytest.mark.slow
def test_iterations_and_alerts_are_events_of_the_run(server, tmp_path):
    run = StandIn(tmp_path, "run-events")

    async def trouble():
        run.state.drifts, run.engines.restarted = 1, 2

    run.hooks = {("train", 1): trouble}
    run.train()
    found = events_of(server, "run-events", 5)
    names = sorted(event["event"] for event in found)
    assert names == ["slime.alert.drift", "slime.alert.engine-restarted"] + 3 * [
        "slime.iteration.done"
    ]
    [parent] = flow_runs_of("run-events")
    for event in found:
        roles = {r["prefect.resource.role"]: r["prefect.resource.id"] for r in event["related"]}
        assert roles["flow-run"] == f"prefect.flow-run.{parent.id}"
    done = {e["payload"]["iteration"]: e["payload"] for e in found if e["event"].endswith("done")}
    assert set(done) == {0, 1, 2} and done[1]["train/loss"] == 0.5
    [restarted] = [event for event in found if event["event"].endswith("restarted")]
    assert restarted["payload"] == {"iteration": 1, "restarts": 2}


@pytest.mark.slow
def test_an_automation_takes_an_alert_as_its_trigger(server, tmp_path):
    trigger = EventTrigger(
        expect={"slime.run.stalled", "slime.alert.*"},
        match={"prefect.resource.id": "slime.run.*"},
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )
    made = Automation(name="alerts", trigger=trigger, actions=[DoNothing()]).create()
    run = StandIn(tmp_path, "run-alerts")

    async def trouble():
        run.engines.restarted = 1

    run.hooks = {("train", 1): trouble}
    run.train()
    EventsWorker.drain_all(timeout=180)
    fired = {
        "event": {"name": ["prefect.automation.action.executed"]},
        "resource": {"id": [f"prefect.automation.{made.id}"]},
    }

    def look():
        answer = httpx.post(f"{server.api_url}/events/filter", json={"filter": fired}, timeout=90)
        return answer.raise_for_status().json()["events"] or None

    assert len(poll("the automation's action", 60, look, interval_s=0.5)) == 1
    made.delete()


@pytest.mark.slow
def test_a_run_without_a_finished_iteration_is_told_as_stalled_once(server, tmp_path, monkeypatch):
    monkeypatch.setattr("flows.pages.feed.TICK_S", 0.1)
    run = StandIn(tmp_path, "run-stalls", num_rollout=1)
    tolerance = run.config.fault_tolerance.model_copy(update={"stall_timeout_s": 0.3})
    run.config = run.config.model_copy(update={"fault_tolerance": tolerance})

    async def wait():
        await asyncio.sleep(1.5)

    run.hooks = {("train", 0): wait}
    run.train()
    told = sorted(events_of(server, "run-stalls", 2), key=lambda event: event["occurred"])
    names = [event["event"] for event in told]
    until_it_ended = names[: names.index("slime.iteration.done") + 1]
    assert until_it_ended == ["slime.run.stalled", "slime.iteration.done"]


def rows(database, query: str, *values) -> int:
    with closing(sqlite3.connect(database)) as opened:
        return opened.execute(query, values).fetchone()[0]


def told_artifacts(database, run_id: str, k: int) -> int:
    """Events that tell of an iteration's artifact, which name another flow run than its own."""
    query = (
        "select count(*) from events where event = 'prefect.artifact.created' and payload like ?"
    )
    return rows(database, query, f'%"{run_id}, iteration {k:06d}"%')


@pytest.mark.slow
def test_signs_of_life_of_a_run_are_kept_for_a_while(server, tmp_path, monkeypatch):
    StandIn(tmp_path, "run-signs", num_rollout=1).train()
    [parent] = flow_runs_of("run-signs")
    settled(server.home / "prefect.db", children_of(parent))
    query = """
      select count(*) from events e join event_resources r on r.event_id = e.id
      where r.resource_id = ? and e.event in
        ('prefect.flow-run.heartbeat', 'prefect.artifact.updated', 'prefect.flow-run.Running')
    """
    database, resource = server.home / "prefect.db", f"prefect.flow-run.{parent.id}"
    before = rows(database, query, resource)
    own = OwnDatabase(database)
    own.prune_events("run-signs", below=0, most=50)
    assert rows(database, query, resource) == before >= 3
    monkeypatch.setattr(retention, "SIGNS_KEPT_S", 0.0)
    own.prune_events("run-signs", below=0, most=50)
    assert rows(database, query, resource) == 1, "the state's event stays"


def settled(database, runs):
    """Waits until the server has written all events of these flow runs."""
    EventsWorker.drain_all(timeout=180)
    query = "select count(*) from task_run where flow_run_id = ? and state_type = 'COMPLETED'"
    events = "select count(*) from event_resources where resource_id = ?"

    def ready():
        done = all(rows(database, query, str(run.id)) == 6 for run in runs)
        told = all(rows(database, events, f"prefect.flow-run.{run.id}") >= 21 for run in runs)
        return (done and told) or None

    poll("everything to be written", 40, ready, interval_s=0.3)


@pytest.mark.slow
def test_old_iterations_leave_the_servers_database_and_others_stay(server, tmp_path, monkeypatch):
    monkeypatch.setattr(retention, "SETTLED_S", 0.0)
    monkeypatch.setattr(retention, "EVENTS_SETTLED_S", 0.0)
    database = server.home / "prefect.db"
    for run_id in ("run-old", "run-other"):
        StandIn(tmp_path / run_id, run_id, num_rollout=4, evaluate_at=()).train()
    [old], [other] = flow_runs_of("run-old"), flow_runs_of("run-other")
    iterations, others = children_of(old), children_of(other)
    settled(database, iterations + others)
    poll("events of artifacts", 20, lambda: all(
        told_artifacts(database, run_id, k) for run_id in ("run-old", "run-other") for k in range(4)
    ) or None)  # fmt: skip
    own = OwnDatabase(database)
    assert own.prune("run-old", below=3, most=2) == 2
    assert own.prune("run-old", below=3, most=2) == 1
    assert own.prune("run-old", below=3, most=2) == 0
    assert [run.name for run in children_of(old)] == ["iteration 000003"]
    assert len(children_of(other)) == 4
    queries = {
        "select count(*) from task_run where flow_run_id = ?": "",
        "select count(*) from log where flow_run_id = ?": "",
        "select count(*) from artifact where flow_run_id = ?": "",
        "select count(*) from flow_run_state where flow_run_id = ?": "",
        "select count(*) from event_resources where resource_id = ?": "prefect.flow-run.",
    }
    for query, prefix in queries.items():
        for run in iterations[:3]:
            assert rows(database, query, f"{prefix}{run.id}") == 0, query
        for run in [iterations[3], *others]:
            assert rows(database, query, f"{prefix}{run.id}") > 0, query
    lost = "select count(*) from event_resources where event_id not in (select id from events)"
    assert rows(database, lost) == 0
    held = "select count(*) from task_run where flow_run_id = ?"
    assert rows(database, held, str(old.id)) == 2, "one stands for the subflow, one is recover"

    assert own.prune_events("run-other", below=2, most=10) == 2
    assert own.prune_events("run-other", below=2, most=10) == 0
    told = [rows(database, "select count(*) from event_resources where resource_id = ?",
                 f"prefect.flow-run.{run.id}") > 0 for run in others]  # fmt: skip
    assert told == [False, False, True, True] and len(children_of(other)) == 4
    for run_id, kept in (("run-old", [0, 0, 0, 1]), ("run-other", [0, 0, 1, 1])):
        assert [told_artifacts(database, run_id, k) for k in range(4)] == kept, run_id
    with get_client(sync_client=True) as client:
        assert OtherServer(client).prune("run-other", below=2, most=10) == 2
    assert [run.name for run in children_of(other)] == ["iteration 000002", "iteration 000003"]
