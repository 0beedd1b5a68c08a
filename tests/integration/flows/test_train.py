"""The flow against a real Prefect server: names, states, order, artifacts, failures, kills."""

import asyncio
import logging
import os
import signal
import subprocess
import sys

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas import filters
from prefect.events.worker import EventsWorker
from prefect.states import Pending, Running

from flows.prefect_api import complete_finished, settle_lost
from slime_core.errors import FullError, TrainerError
from slime_core.run import pause
from slime_core.run.pause import Patience
from slime_core.waits import poll
from tests.integration.flows.standin import StandIn

STAGES = ["sample", "generate", "reward", "pack", "train", "sync"]


async def _read(method: str, arguments: dict):
    async with get_client() as client:
        return await getattr(client, method)(**arguments)


def read(method: str, **arguments):
    """One call of Prefect's client."""
    return asyncio.run(_read(method, arguments))


def flow_runs_of(run_id: str):
    condition = filters.FlowRunFilter(name=filters.FlowRunFilterName(any_=[run_id]))
    return sorted(read("read_flow_runs", flow_run_filter=condition), key=lambda run: run.created)


def children_of(parent):
    condition = filters.FlowRunFilter(
        parent_flow_run_id=filters.FlowRunFilterParentFlowRunId(any_=[parent.id])
    )
    return sorted(read("read_flow_runs", flow_run_filter=condition), key=lambda run: run.name)


def tasks_of(flow_run):
    condition = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[flow_run.id]))
    return {task.name: task for task in read("read_task_runs", flow_run_filter=condition)}


def recorded_tasks_of(flow_run, count: int):
    """The same once all are there and final: Prefect records task runs a little late."""
    EventsWorker.drain_all(timeout=180)

    def ready():
        found = tasks_of(flow_run)
        final = all(task.state is not None and task.state.is_final() for task in found.values())
        return found if len(found) == count and final else None

    return poll(f"{count} task runs of {flow_run.name}", 30, ready, interval_s=0.2)


def test_a_run_is_shown_as_named_iterations_and_stages(server, tmp_path):
    run = StandIn(tmp_path, "run-names", sealed={("seal", 1)})
    launch = run.train()
    assert launch.finished and run.closed == "finished"
    iterations = [[(stage, k) for stage in STAGES] for k in range(3)]
    iterations[1].append(("evaluate", 1))
    assert run.calls == [("evaluate", -1), *(call for calls in iterations for call in calls)]

    [parent] = flow_runs_of("run-names")
    assert parent.state.is_completed() and "run:run-names" in parent.tags
    children = children_of(parent)
    assert [child.name for child in children] == [f"iteration {k:06d}" for k in range(3)]
    assert [child.parameters for child in children] == [{"k": k} for k in range(3)]
    assert all(child.state.is_completed() for child in children)
    tasks = recorded_tasks_of(children[1], 7)
    assert set(tasks) == {f"{stage} 000001" for stage in [*STAGES, "evaluate"]}
    assert tasks["generate 000001"].state.name == "Completed (from store)"
    assert tasks["train 000001"].state.name == "Completed"


def test_stage_lines_reach_the_log_of_the_run(server, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="tasks"):
        StandIn(tmp_path, "run-logs", num_rollout=1).train()
    lines = [line for line in caplog.messages if line.startswith("generate 000000: seal/000000")]
    assert len(lines) == 1 and "32 rows, 160 tokens" in lines[0]


def test_a_failing_stage_fails_the_run_with_its_own_error(server, tmp_path):
    async def fail():
        raise TrainerError("rank 0 ended: start again")

    run = StandIn(tmp_path, "run-fails", hooks={("train", 1): fail})
    with pytest.raises(TrainerError, match="rank 0 ended"):
        run.train()
    assert run.closed == "failed"
    [parent] = flow_runs_of("run-fails")
    assert parent.state.is_failed() and "rank 0 ended" in parent.state.message
    assert run.calls[-1] == ("train", 1)


def test_a_run_whose_store_is_away_is_shown_as_paused(server, tmp_path, monkeypatch):
    seen, said = [], []  # pytest's own handler goes when Prefect sets up logging in its first flow
    monkeypatch.setattr(pause.log, "warning", lambda text, *given: said.append(text % given))
    left = [FullError("no space left to write the part; free some")]

    async def away():
        if left:
            raise left.pop()

    def probe(_):
        [parent] = flow_runs_of("run-pauses")
        seen.append((parent.state.type.value, parent.state.name, parent.state.message))

    monkeypatch.setattr(Patience, "_probe", probe)
    run = StandIn(tmp_path, "run-pauses", hooks={("generate", 1): away})
    assert run.train().finished
    assert run.calls.count(("generate", 1)) == 2 and run.trained() == [0, 1, 2]
    [(kind, name, message)] = seen
    assert (kind, name) == ("RUNNING", "Paused")
    assert "paused at generate 000001: no space left to write the part; free some" in message
    assert any("generate 000001 goes on after a pause" in line for line in said)
    [parent] = flow_runs_of("run-pauses")
    assert parent.state.is_completed()
    assert [child.state.type.value for child in children_of(parent)] == ["COMPLETED"] * 3


def test_a_resumed_run_goes_on_at_its_next_iteration(server, tmp_path):
    StandIn(tmp_path, "run-resumes", num_rollout=2).train()
    again = StandIn(tmp_path, "run-resumes", num_rollout=4)
    assert again.train().finished
    assert again.trained() == [2, 3]
    assert len(list(again.outbox.file.read())) == 4 + 2


@pytest.mark.slow
def test_what_a_killed_process_left_running_is_marked_crashed(server, tmp_path):
    command = [sys.executable, "-m", "tests.integration.flows.standin", str(tmp_path)]
    environment = {**os.environ, "PREFECT_API_URL": server.api_url}
    killed = subprocess.Popen(
        [*command, "run-killed", "4", "train", "1"], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        poll("the run to hold", 60, lambda: (tmp_path / "held").exists() or None)
        [parent] = flow_runs_of("run-killed")
        done, running = children_of(parent)
        poll("its task to be seen", 30, lambda: tasks_of(running).get("train 000001"))
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait(10)
    forget_the_end_of(recorded_tasks_of(done, len(STAGES))["train 000000"])

    again = StandIn(tmp_path, "run-killed", num_rollout=4)
    assert again.train().finished
    assert again.trained() == [1, 2, 3]
    old, new = flow_runs_of("run-killed")
    assert old.state.is_crashed() and new.state.is_completed()
    assert [child.state.type.value for child in children_of(old)] == ["COMPLETED", "CRASHED"]
    assert [child.name for child in children_of(new)] == [f"iteration {k:06d}" for k in (1, 2, 3)]
    assert tasks_of(running)["train 000001"].state.is_crashed()
    assert tasks_of(done)["train 000000"].state.is_crashed()


def forget_the_end_of(task):
    """As a server does that is killed before it has written a task run's end."""
    read("set_task_run_state", task_run_id=task.id, state=Running(), force=True)
    assert read("read_task_run", task_run_id=task.id).state.is_running()


@pytest.mark.slow
def test_a_run_that_was_killed_before_prefect_knew_of_its_end_is_completed(server, tmp_path):
    assert StandIn(tmp_path, "run-told-late", num_rollout=1).train().finished
    [parent] = flow_runs_of("run-told-late")
    [child] = children_of(parent)
    forget_the_end_of(recorded_tasks_of(child, len(STAGES))["sync 000000"])
    # A server that is killed while a subflow begins leaves it behind as pending.
    read("set_flow_run_state", flow_run_id=child.id, state=Pending(), force=True)
    # The third is the task run by which the parent shows its subflow.
    assert asyncio.run(settle_lost(parent.id)) == 3
    assert tasks_of(child)["sync 000000"].state.is_completed()
    assert [run.state.is_completed() for run in children_of(parent)] == [True]
    assert asyncio.run(settle_lost(parent.id)) == 0

    forget_the_end_of(tasks_of(child)["sync 000000"])
    for run in (parent, child):
        read("set_flow_run_state", flow_run_id=run.id, state=Running(), force=True)

    # The fourth is the task run by which the parent shows its subflow.
    assert asyncio.run(complete_finished("run-told-late")) == 4
    [parent] = flow_runs_of("run-told-late")
    [child] = children_of(parent)
    assert parent.state.is_completed() and child.state.is_completed()
    assert tasks_of(child)["sync 000000"].state.is_completed()
    assert asyncio.run(complete_finished("run-told-late")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_rollout", [4, 5], ids=["back-in-the-last", "back-before-the-last"])
def test_a_server_that_is_killed_in_mid_iteration_does_not_end_the_run(
    server, tmp_path, num_rollout
):
    async def kill_server():
        server.process.kill()
        server.process.wait(10)

    async def revive_server():
        server.process = server.restarted().process
        await asyncio.to_thread(server.wait_healthy, 60)

    run_id = f"run-survives-{num_rollout}"
    run = StandIn(tmp_path, run_id, num_rollout)
    run.hooks = {("generate", 1): kill_server, ("generate", 3): revive_server}
    assert run.train().finished
    assert run.trained() == list(range(num_rollout))
    assert len(run.calls) == num_rollout * 6 + 2
    [parent] = flow_runs_of(run_id)
    assert parent.state.is_completed()
    shown = {child.name: child.state.type.value for child in children_of(parent)}
    seen = [k for k in (0, 1, 4) if k < num_rollout]  # 2 and 3 began while it was away
    assert shown == {f"iteration {k:06d}": "COMPLETED" for k in seen}


@pytest.mark.slow
def test_a_run_that_fails_after_the_server_was_away_leaves_no_iteration_running(server, tmp_path):
    async def kill_server():
        server.process.kill()
        server.process.wait(10)

    async def fail():
        server.process = server.restarted().process
        await asyncio.to_thread(server.wait_healthy, 60)
        raise TrainerError("broken rows")

    run = StandIn(tmp_path, "run-fails-away", num_rollout=3)
    run.hooks = {("generate", 1): kill_server, ("generate", 2): fail}
    with pytest.raises(TrainerError, match="broken rows"):
        run.train()
    [parent] = flow_runs_of("run-fails-away")
    assert parent.state.is_failed()
    shown = {child.name: child.state.type.value for child in children_of(parent)}
    assert shown == {"iteration 000000": "COMPLETED", "iteration 000001": "COMPLETED"}
