"""A real MLflow server that is killed in the middle of a run and comes back before its end."""

import json
import subprocess

import pytest
from mlflow.tracking import MlflowClient

from slime_core.tracking.registry import sanitised
from slime_core.waits import poll
from tests.e2e.runs import RunFolder, finish, start
from tests.mlflow_server import MlflowServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
ITERATIONS, INTERVAL = 24, 4


def trained(run: RunFolder, process: subprocess.Popen[str], iterations: int) -> None:
    def look() -> bool | None:
        assert process.poll() is None, f"{process.stdout.read()}\n{run.logs()}"  # type: ignore[union-attr]
        return len(list(run.store.glob("iterations/*/ledger.json"))) >= iterations or None

    poll(f"{iterations} iterations", 180, look)


def test_nothing_is_lost_or_doubled_while_mlflow_is_away(tmp_path, monkeypatch):
    (tmp_path / "mlflow").mkdir()
    server = MlflowServer(tmp_path / "mlflow")
    try:
        server.wait()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
        run = RunFolder(tmp_path / "w")
        flags = ("--num-rollout", str(ITERATIONS), "--eval-interval", str(INTERVAL))
        process = start(run, *flags, "--no-prefect")
        trained(run, process, 3)
        server.kill()
        trained(run, process, 14)
        server.start()
        output = finish(process, run)
        server.wait()
        if "MLflow lacks" in output:  # the server came back too late for the end of the run
            assert "is finished" in finish(start(run, *flags, "--no-prefect"), run)
        compare(run, MlflowClient(server.uri))
    finally:
        server.kill()


def compare(run: RunFolder, client: MlflowClient) -> None:
    """MLflow's run against metrics.jsonl and the store: every value once, nothing besides."""
    [found] = client.search_runs([client.get_experiment_by_name("slime-flow").experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == run.run_id
    assert found.data.params["num_rollout"] == str(ITERATIONS)
    assert len(found.data.params) > 100
    tags = found.data.tags
    assert tags["slime.run_id"] == run.run_id
    assert {"slime.config_digest", "slime.data_digest", "slime.store"} <= tags.keys()
    assert not [tag for tag in tags if tag.startswith("slime.now.")]
    wanted: dict[str, list[tuple[int, float]]] = {}
    lines = (run.workspace / "local" / run.run_id / "metrics.jsonl").read_text().splitlines()
    for record in map(json.loads, lines):
        for name, value in record["metrics"].items():
            wanted.setdefault(sanitised(name), []).append((record["step"], float(value)))
    assert len(wanted["rollout/raw_reward"]) == ITERATIONS
    assert set(found.data.metrics) == set(wanted)
    for name, values in wanted.items():
        history = client.get_metric_history(found.info.run_id, name)
        got = sorted((item.step, item.value) for item in history)
        assert got == sorted(values), name
    evaluations = [path.relative_to(run.store / "evals").with_suffix("").as_posix()
                   for path in run.store.glob("evals/*/*.json")]  # fmt: skip
    assert len(evaluations) == 2 * (ITERATIONS // INTERVAL + 1)
    listed = [table["path"] for table in json.loads(tags["mlflow.loggedArtifacts"])]
    assert sorted(listed) == sorted(f"samples/{name}.json" for name in evaluations)
    for path in listed:
        client.download_artifacts(found.info.run_id, path)
