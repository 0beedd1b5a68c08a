"""Background processes: found again by another command, told apart from a pid that was reused."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from uuid import uuid4

import anyio
import psutil
import pytest

from flows.services import processes, runs, stack, worker_app
from flows.services.ports import listener
from flows.services.processes import ServiceError
from flows.services.stack import Plan
from slime_core.run.epoch import Lease
from slime_core.run.process import own_identity
from tests.unit.store.runs import stored_run

SLEEP = [sys.executable, "-c", "import time; time.sleep(120)"]
DEAF = [
    sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);"
    "time.sleep(120)",
]  # fmt: skip
FAMILY = [
    sys.executable, "-c",
    "import subprocess, sys, time;"
    "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)']).pid, flush=1);"
    "time.sleep(120)",
]  # fmt: skip


@pytest.fixture
def started(tmp_path):
    made = []

    def start(name="worker", command=SLEEP, port=0):
        service = processes.start(
            tmp_path, name, command, environment=dict(os.environ), address="here", port=port
        )
        made.append(service)
        return service

    yield start
    for service in made:
        processes.stop(service, 0.0)


def test_another_command_finds_a_service_and_ends_it(tmp_path, started):
    service = started()
    found = processes.running(tmp_path, "worker")
    assert found == service and found.alive
    assert processes.stop(found, 5.0) is True
    assert processes.running(tmp_path, "worker") is None
    assert processes.recorded(tmp_path, "worker") == service
    assert processes.stop(found, 5.0) is False


def test_a_reused_pid_is_neither_alive_nor_killed(tmp_path, started):
    service = started()
    stranger = replace(
        service, process=replace(service.process, start_ticks=service.process.start_ticks - 1)
    )
    assert not stranger.alive
    assert processes.stop(stranger, 5.0) is False
    assert service.alive


def test_a_killed_service_counts_as_gone(tmp_path, started):
    service = started()
    os.kill(service.process.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(service.process.pid)], timeout=30)
    assert processes.running(tmp_path, "worker") is None


def test_one_that_does_not_listen_is_killed(tmp_path, started):
    service = started(command=DEAF)
    wait_for_log(tmp_path, "deaf")
    begin_s = time.monotonic()
    assert processes.stop(service, 0.3) is True
    assert 0.3 <= time.monotonic() - begin_s < 30


def test_its_children_end_with_it(tmp_path, started):
    service = started(command=FAMILY)
    child = int(wait_for_log(tmp_path, "\n"))
    assert processes.stop(service, 5.0) is True
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(timeout=30)
    assert not psutil.pid_exists(child)


def wait_for_log(tmp_path, text: str) -> str:
    def written() -> str | None:
        content = processes.log_of(tmp_path, "worker").read_text()
        return content if text in content else None

    return processes_poll(written)


def processes_poll(ready):
    from slime_core.waits import poll

    return poll("the child's first words", 10, ready)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"process": {"pid": 1}, "name": "x"}'])
def test_a_damaged_record_is_named(tmp_path, text):
    processes.folder_of(tmp_path).mkdir()
    (processes.folder_of(tmp_path) / "server.json").write_text(text)
    with pytest.raises(ServiceError, match=r"server\.json: cannot be read"):
        processes.recorded(tmp_path, "server")


def test_a_foreign_server_on_the_port_is_named():
    code = (
        "import socket, sys; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(other.stdout.readline())
        with pytest.raises(ServiceError) as raised:
            listener(port, "MLflow's page", "--mlflow-port")
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()
    message = str(raised.value)
    assert f"port {port} for MLflow's page is in use by process {other.pid} (" in message
    assert "--mlflow-port PORT" in message


def test_the_port_of_the_last_time_is_taken_again(tmp_path, started):
    assert stack._port(tmp_path, "server", None, 4200) == 4200
    started("server", port=4321)
    assert stack._port(tmp_path, "server", None, 4200) == 4321
    assert stack._port(tmp_path, "server", 4400, 4200) == 4400


def test_what_runs_already_is_not_started_again(tmp_path, started):
    for name in (stack.SERVER, stack.MLFLOW, stack.WORKER):
        started(name, port=1)
    plan = Plan(tmp_path)
    assert stack.start_server(plan) is None
    assert stack.start_mlflow(plan) is None
    assert stack.start_worker(plan, "http://127.0.0.1:1/api") is None
    assert stack.api_url_of(tmp_path) == "here/api"


def test_the_server_of_a_running_command_is_not_doubled(tmp_path):
    home = tmp_path / "prefect"
    home.mkdir()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        mark = [sys.executable, "-c", "import time; time.sleep(60)", "flows.server_app"]
        with subprocess.Popen(mark) as other:
            (home / "server.pid").write_text(json.dumps({"pid": other.pid, "port": 1}))
            with pytest.raises(ServiceError, match=f"process {other.pid}"):
                stack.start_server(Plan(tmp_path, prefect_port=0))
            other.kill()


def test_a_worker_that_is_told_to_end_waits_until_its_flows_are_reported(monkeypatch):
    """Prefect hears how a flow ended after its process has: too late for a worker that left."""
    flow = psutil.Popen(SLEEP)
    seen = []

    async def ends() -> None:
        limiter = anyio.CapacityLimiter(3)
        limiter.acquire_on_behalf_of_nowait("run")
        worker = SimpleNamespace(is_setup=True, limiter=limiter)

        async def report() -> None:
            await asyncio.to_thread(flow.wait, 20)
            seen.append(limiter.available_tokens)
            await asyncio.sleep(0)
            limiter.release_on_behalf_of("run")
            seen.append("reported")

        telling = asyncio.create_task(report())
        await worker_app.end_flows(worker, 20.0)
        assert seen == [0, "reported"], "no room for another run, and the report has gone out"
        await telling

    monkeypatch.setattr(worker_app, "children", lambda: [flow])
    asyncio.run(ends())
    assert flow.returncode == -signal.SIGTERM


def test_a_worker_does_not_wait_for_a_flow_for_ever(monkeypatch, capsys):
    async def ends() -> None:
        limiter = anyio.CapacityLimiter(1)
        limiter.acquire_on_behalf_of_nowait("run")
        await worker_app.end_flows(SimpleNamespace(is_setup=True, limiter=limiter), 0.2)

    monkeypatch.setattr(worker_app, "children", lambda: [])
    asyncio.run(asyncio.wait_for(ends(), 10))
    assert "1 flow runs have not ended" in capsys.readouterr().out


def test_a_flow_run_is_an_orphan_once_the_worker_and_its_process_are_gone(started):
    worker, alone, held = started(), uuid4(), uuid4()
    assert not runs.orphans(None)(alone)
    assert not runs.orphans(worker)(alone), "its worker may be starting it"
    processes.stop(worker, 5.0)
    environment = {**os.environ, "PREFECT__FLOW_RUN_ID": str(held)}
    with subprocess.Popen(SLEEP, env=environment) as process:
        tells = runs.orphans(worker)
        process.kill()
    assert tells(alone) and not tells(held), "a flow outlives its worker"


def test_runs_that_use_the_server_are_told_from_others(tmp_path):
    backend = stored_run(tmp_path / "store", "elsewhere", 0)
    with Lease.acquire(backend), socket.create_server(("127.0.0.1", 0)) as listening:
        service = processes.Service("server", own_identity(), "", listening.getsockname()[1])
        assert runs.users_of(service, tmp_path) == []
        with socket.create_connection(listening.getsockname()):
            assert [run.run_id for run in runs.users_of(service, tmp_path)] == ["elsewhere"]
    assert runs.users_of(service, tmp_path / "none") == []


def test_down_ends_the_worker_before_the_server(tmp_path, started):
    for name in (stack.SERVER, stack.MLFLOW, stack.WORKER):
        started(name)
    told = []
    ended = [one.name for one in stack.stop_all(tmp_path, lambda worker: told.append(worker.name))]
    assert ended == [stack.WORKER, stack.MLFLOW, stack.SERVER]
    assert told == [stack.WORKER]
    assert list(stack.stop_all(tmp_path, told.append)) == []
