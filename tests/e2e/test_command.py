"""The command as a person uses it: train, resume, stop, and open the pages it names."""

import os
import re
import signal
import sqlite3
import subprocess
import time
import urllib.request

import psutil
import pytest

from slime_core.waits import poll
from tests.e2e.runs import ROOT, RunFolder, command, finish, start

pytestmark = pytest.mark.e2e


def printed(process: subprocess.Popen[str], text: str) -> str:
    """Reads what the command prints until a line holds `text`; returns all of it."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"{text!r} was never printed:\n{''.join(lines)}")


def rows(run: RunFolder, query: str) -> list[tuple]:
    with sqlite3.connect(run.workspace / "prefect" / "prefect.db") as database:
        return database.execute(query).fetchall()


def ended(children: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(children, timeout=90)
    assert not alive, [" ".join(child.cmdline()[:4]) for child in alive]


def test_a_run_ends_with_where_everything_is_and_resumes(tmp_path):
    run = RunFolder(tmp_path)
    first = finish(start(run, "--num-rollout", "2", "--eval-interval", "2"), run)
    assert "starting run chain" in first
    assert "Prefect shows it at http://127.0.0.1:" in first
    number = r"0\.\d+"
    line = rf"2 of 2 done \(iteration 1\)  0 s left  reward {number}  eval greedy {number} sampled"
    assert re.search(line, first)
    assert "run chain finished" in first
    assert str(run.store) in first and "metrics.jsonl" in first and "mlflow ui" in first

    same = finish(start(run, "--num-rollout", "2", "--eval-interval", "2"), run)
    assert "run chain is finished (2 of 2 iterations)" in same and "metrics.jsonl" in same
    assert "starting" not in same and " up after" not in same, "nothing was started for it"

    again = finish(start(run, "--num-rollout", "3", "--eval-interval", "2"), run)
    assert "resuming run chain after 2 iterations" in again
    assert "it had finished, and num_rollout is 3 now" in again
    assert "3 of 3 done (iteration 2)" in again and "2 of 3 done" not in again

    states = rows(run, "select name, state_name from flow_run order by name, created")
    assert states == [
        ("chain", "Completed"), ("chain", "Completed"),
        *((f"iteration {k:06d}", "Completed") for k in range(3)),
    ]  # fmt: skip
    tasks = dict(rows(run, "select name, state_name from task_run where name like '% 000002'"))
    stages = ("sample", "generate", "reward", "pack", "train", "sync")
    assert {f"{stage} 000002": "Completed" for stage in stages}.items() <= tasks.items()
    logged = [text for (text,) in rows(run, "select message from log where message like '%: %'")]
    assert any(text.startswith("generate 000002: groups/000002/seal.json") for text in logged)
    with sqlite3.connect(run.workspace / "mlflow" / "mlflow.db") as database:
        query = "select step from metrics where key = 'rollout/raw_reward' order by step"
        assert database.execute(query).fetchall() == [(0,), (1,), (2,)]
        assert database.execute("select name, status from runs").fetchall() == [
            ("chain", "FINISHED")
        ]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_it_resumes(tmp_path, number, status):
    run = RunFolder(tmp_path)
    flags = ("--num-rollout", "200", "--eval-interval", "200", "--skip-eval-before-train")
    process = start(run, *flags)
    printed(process, "2 of 200 done")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == status, output
    assert "stopping" in output and "stopped; the same command goes on" in output
    assert "Traceback" not in output
    ended(children)
    done = len(list(run.store.glob("iterations/*/ledger.json")))
    assert rows(run, "select state_name from flow_run where name = 'chain'") == [("Cancelled",)]

    flags = ("--num-rollout", str(done + 1), "--eval-interval", "200", "--skip-eval-before-train")
    assert f"after {done} iterations" in finish(start(run, *flags), run)


@pytest.mark.slow
def test_a_second_ctrl_c_kills(tmp_path):
    run = RunFolder(tmp_path)
    process = start(run, "--num-rollout", "200", hold_at="train@1")
    poll("the run to hold", 120, lambda: (tmp_path / "train@1").exists() or None)
    refused = subprocess.run(command(run), cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert refused.returncode == 1 and "belongs to process" in refused.stderr
    assert "starting" not in refused.stdout, "a run in use is refused before anything is started"
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    printed(process, "stopping")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 130
    assert "stopped; the same command goes on" in output
    ended(children)


@pytest.mark.slow
def test_a_rollout_worker_beyond_its_budget_ends_the_run_in_one_sentence(tmp_path):
    run, held = RunFolder(tmp_path), "generate-middle@1"
    flags = ("--num-rollout", "3", "--eval-interval", "3", "--skip-eval-before-train")
    process = start(run, *flags, "--engine-restarts", "0", hold_at=held)
    poll("the run to hold", 120, lambda: (tmp_path / held).exists() or None)
    children = psutil.Process(process.pid).children(recursive=True)
    psutil.Process(int((tmp_path / held).read_text())).kill()
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 1, output
    said = output.split("1 of 3 done")[1].strip().splitlines()[1:]
    assert len(said) == 2, output
    assert said[0] == f"logs of the run: {tmp_path / 'local' / 'chain' / 'logs'}"
    assert said[1].startswith("slime: the "), "the stage or the question of its engines failed"
    assert " failed: the process of the rollout worker ended" in said[1]
    ended(children)
    assert "after 1 iteration" in finish(start(run, *flags), run)


@pytest.mark.slow
def test_a_prefect_server_that_is_killed_is_started_again(tmp_path):
    run = RunFolder(tmp_path)
    flags = ("--num-rollout", "40", "--eval-interval", "40", "--skip-eval-before-train")
    process = start(run, *flags)
    printed(process, "3 of 40 done")
    [server] = [
        child
        for child in psutil.Process(process.pid).children()
        if "flows.server_app" in child.cmdline()
    ]
    server.kill()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "Prefect's server ended: starting it again" in output
    assert len(list(run.store.glob("iterations/*/ledger.json"))) == 40
    assert rows(run, "select state_name from flow_run where name = 'chain'") == [("Completed",)]


@pytest.mark.slow
def test_a_prefect_server_that_hangs_for_ten_seconds_ends_nothing(tmp_path):
    run = RunFolder(tmp_path)
    flags = ("--num-rollout", "30", "--eval-interval", "30", "--skip-eval-before-train")
    process = start(run, *flags)
    printed(process, "3 of 30 done")
    [server] = [
        child
        for child in psutil.Process(process.pid).children()
        if "flows.server_app" in child.cmdline()
    ]
    server.suspend()
    time.sleep(10)
    server.resume()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert len(list(run.store.glob("iterations/*/ledger.json"))) == 30
    assert rows(run, "select state_name from flow_run where name = 'chain'") == [("Completed",)]


@pytest.mark.slow
def test_the_printed_commands_open_the_pages(tmp_path):
    run = RunFolder(tmp_path)
    output = finish(start(run, "--num-rollout", "1", "--eval-interval", "1"), run)
    for name in ("MLflow", "Prefect"):
        found = re.search(rf"^  {name} +(.*) --port (\d+)   \((http\S+)\)$", output, re.MULTILINE)
        assert found, output
        line, usual, address = found.groups()
        port = str(int(usual) + 20000)
        page = subprocess.Popen(
            f"exec env {line} --port {port}", shell=True, cwd=ROOT, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            url = address.replace(usual, port)
            text = poll(f"the page of {name}", 90, lambda url=url: fetched(url), interval_s=0.5)
            assert "<html" in text.lower()
        finally:
            os.killpg(page.pid, signal.SIGKILL)
            page.wait(10)


def fetched(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.read().decode()
    except OSError:
        return None


@pytest.mark.slow
def test_without_prefect_nothing_of_it_is_started(tmp_path):
    run = RunFolder(tmp_path)
    output = finish(start(run, "--num-rollout", "1", "--eval-interval", "1", "--no-prefect"), run)
    assert "run chain finished" in output and "Prefect" not in output
    assert not (tmp_path / "prefect").exists()
