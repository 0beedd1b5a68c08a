"""Runs on a Ray cluster that they did not start: to the end, killed, taken up again, reaped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from slime_core.cluster.external_ray import ExternalRay, Join
from slime_core.cluster.reach import cluster_facts
from slime_core.cluster.spawner import EngineOrder
from slime_core.errors import ConfigError
from slime_core.run.audit import audit
from slime_core.run.paths import RunPaths
from slime_core.waits import poll
from tests.e2e.runs import QUICKSTART, ROOT, RUN_TIMEOUT_S, RunFolder, finish, start
from tests.ray_cluster import Cluster, Probe, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ITERATIONS = 4
FLAGS = (
    *("--num-rollout", str(ITERATIONS), "--eval-interval", "2"),
    *("--sglang-enable-deterministic-inference", "--no-use-mlflow"),
)
QUIET = (*FLAGS, "--no-prefect")
ORPHAN_S = 4.0
SLACK_S = 6.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with started() as made:
            yield made


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with a Ray of its own that nobody disturbs."""
    run = RunFolder(tmp_path_factory.mktemp("untouched"))
    finish(start(run, *QUIET), run)
    return run


def check_equal(run: RunFolder, untouched: RunFolder) -> None:
    """The same groups, batches and training, to the last bit of the weights; each once."""
    found = audit(run.store)
    assert found.sound and found.iterations == ITERATIONS, found.problems
    assert (found.lost, found.doubled, found.skipped) == ([], [], [])
    for pattern in ("groups/*/seal.json", "iterations/*/*.json", "evals/**/*.json"):
        assert run.bodies(pattern) == untouched.bodies(pattern), pattern
    last = run.document(f"iterations/{ITERATIONS - 1:06d}/ledger.json")["body"]
    assert last["result"]["steps"][-1]["weights_digest"]


def killed_at(point: str, run: RunFolder, cluster: Cluster, *flags: str) -> list[psutil.Process]:
    """Starts a run there, and ends with SIGKILL what is outside of the cluster when it is at a
    point; returns its processes inside."""
    command = start(run, *flags, hold_at=point)
    marker = run.workspace / point

    def held() -> bool | None:
        assert command.poll() is None, f"{command.communicate()[0]}\n{run.logs()}"
        return marker.exists() or None

    poll(f"a process at {point}", RUN_TIMEOUT_S, held)
    outside = psutil.Process(command.pid).children(recursive=True)
    command.kill()
    for process in outside:
        process.kill()
    command.communicate(timeout=90)
    marker.unlink()
    return cluster.of_runs()


def slime(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli.main", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_run_trains_there_and_the_cluster_lives_on(cluster, untouched, tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    finish(start(run, *QUIET), run)
    check_equal(run, untouched)
    cluster.wait_empty(SLACK_S)
    assert cluster.is_whole()
    logs = run.workspace / "local" / run.run_id / "logs"
    assert {"trainer-0.log", "rollout-0.log", "engine-0.log", "supervisor.log"} <= {
        path.name for path in logs.iterdir()
    }
    assert not (run.workspace / "local" / run.run_id / "ray-folder").exists(), "no Ray of its own"


def test_nothing_outlives_the_orphan_timeout_and_the_run_goes_on(cluster, untouched, tmp_path):
    """Command and Prefect are killed while the trainer is in the middle of a step."""
    run = RunFolder(tmp_path)
    flags = (*FLAGS, "--ray-address", cluster.address, "--orphan-timeout-s", str(ORPHAN_S))
    left = killed_at("train-middle@2", run, cluster, *flags)
    killed_s = time.monotonic()
    assert len(left) == 4, "supervisor, trainer, rollout worker and engine do not die with it"
    cluster.wait_empty(ORPHAN_S + SLACK_S)
    assert time.monotonic() - killed_s > ORPHAN_S / 2, "it was given time"
    assert cluster.is_whole()
    said = (run.workspace / "local" / run.run_id / "logs/supervisor.log").read_text()
    assert "nothing was heard of process" in said and "ended trainer-0 (process" in said
    assert "resuming run" in finish(start(run, *flags), run)
    check_equal(run, untouched)
    assert cluster.is_whole()


def test_the_next_start_ends_what_is_left_before_it_trains(cluster, untouched, tmp_path):
    run = RunFolder(tmp_path)
    flags = (*QUIET, "--ray-address", cluster.address, "--orphan-timeout-s", "600")
    left = killed_at("train-middle@2", run, cluster, *flags)
    assert len(left) == 4
    finish(start(run, *flags), run)
    assert not [process for process in left if process.is_running()]
    said = (run.workspace / "local" / run.run_id / "logs/driver.log").read_text()
    assert "ended what an earlier start had left: trainer-0 (process" in said
    check_equal(run, untouched)
    cluster.wait_empty(SLACK_S)
    assert cluster.is_whole()


def test_reap_ends_what_is_left_and_says_so(cluster, tmp_path):
    run = RunFolder(tmp_path, "to-reap")
    flags = (*QUIET, "--ray-address", cluster.address, "--orphan-timeout-s", "600")
    killed_at("generate-middle@1", run, cluster, *flags)
    other = slime("reap", "another-run", "--address", cluster.address)
    assert other.returncode == 0, other.stderr
    assert "has nothing of a run another-run (it has to-reap)" in other.stdout
    assert len(cluster.of_runs()) == 4
    elsewhere = f"ray://127.0.0.1:{cluster.client_port}"
    done = slime("reap", "to-reap", "--address", elsewhere)
    assert done.returncode == 0, done.stderr
    for name in ("trainer-0", "rollout-0", "engine-0"):
        assert f"ended {name} (process " in done.stdout
    cluster.wait_empty(SLACK_S)
    again = slime("reap", "to-reap", "--address", cluster.address)
    assert again.returncode == 0 and "has nothing of a run to-reap" in again.stdout
    assert cluster.is_whole()


def test_a_run_whose_supervisor_dies_ends_with_a_sentence(cluster, tmp_path):
    run = RunFolder(tmp_path)
    flags = (*QUIET, "--ray-address", cluster.address)
    command = start(run, *flags, hold_at="train-middle@1")
    marker = run.workspace / "train-middle@1"
    poll("a held trainer", RUN_TIMEOUT_S, lambda: marker.exists() or None)
    for process in cluster.of_runs():
        if "Supervisor" in " ".join(process.cmdline()):
            process.kill()
    output, _ = command.communicate(timeout=RUN_TIMEOUT_S)
    assert command.returncode == 1, output
    assert output.strip().splitlines()[-1].startswith("slime: ") and "Traceback" not in output
    assert "the same command goes on" in output
    cluster.wait_empty(SLACK_S)
    assert cluster.is_whole()


def test_a_job_that_is_submitted_trains(cluster, tmp_path):
    """Prefect's server is started by the job on the head node."""
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--working-dir", "."]
    submit += ["--address", f"http://127.0.0.1:{cluster.dashboard_port}", "--"]
    line = ["python3", "train.py", str(QUICKSTART.relative_to(ROOT)), "--num-rollout", "2"]
    place = ["--workspace", str(tmp_path), "--run-id", "job", "--no-use-mlflow"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def submitted(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*submit, *words], cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=RUN_TIMEOUT_S,
        )  # fmt: skip

    refused = submitted(*line)
    assert refused.returncode != 0
    assert "deletes after it: give --workspace with a folder that lasts" in refused.stdout
    done = submitted(*line, *place)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert "run job finished" in done.stdout
    run = RunFolder(Path(tmp_path), "job")
    assert len(run.bodies("iterations/*/ledger.json")) == 2
    assert (tmp_path / "prefect" / "prefect.db").exists()
    cluster.wait_empty(SLACK_S)
    assert cluster.is_whole()


def test_gpus_are_asked_for_by_the_supervisor_and_handed_on(cluster, tmp_path):
    """The command is on a node without GPUs: the run is on the other one, reachable from here."""
    with cluster.second_node(gpus=2):
        facts = cluster_facts(cluster.address)
        assert (facts.nodes, facts.gpus, facts.gpus_of_a_node) == (2, 2, 2)
        paths = RunPaths.create(tmp_path, "gpu")
        store = tmp_path / "store" / "gpu"

        def joined(gpus: int, start_s: float) -> ExternalRay:
            join = Join(facts, "gpu", store.as_uri(), paths, gpus, 60.0, start_s)
            return ExternalRay(join, lambda: 0)

        def refusal(gpus: int, start_s: float) -> str:
            cluster_ray = joined(gpus, start_s)
            try:
                with pytest.raises(ConfigError) as error:
                    cluster_ray.start()
                return str(error.value)
            finally:
                cluster_ray.stop()

        assert "had no node with 3 free GPUs within 4 s" in refusal(3, 4.0)
        (paths.logs / "driver.log").touch()
        unseen = refusal(1, 60.0)
        assert f"does not see {store}/epochs/000000.json: put workspace and store" in unseen
        (store / "epochs").mkdir(parents=True)
        (store / "epochs" / "000000.json").touch()
        here = joined(2, 60.0)
        try:
            here.start()
            probe = here.spawn("probe", Probe, {"num_cpus": 0, "max_restarts": 0})
            node, visible = ray.get(probe.seen.remote(), timeout=180)
            assert node != ray.get_runtime_context().get_node_id()
            assert sorted(visible.split(",")) == ["0", "1"]
            options = {"device": "cpu", "dtype": "float32"}
            model = str(QUICKSTART.parent / "quickstart" / "model")
            engine = here.engine(EngineOrder("embedded", model, paths.logs / "e.log", options))
            assert "127.0.0.1" not in engine.url, "the command has to reach it, too"
            engine.start()
            engine.wait_healthy(240)
            assert engine.alive
        finally:
            here.stop()
        cluster.wait_empty(SLACK_S)
