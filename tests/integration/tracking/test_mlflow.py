"""MLflow itself: a database in the workspace, and a server that is killed and comes back."""

import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from mlflow.tracking import MlflowClient

from flows.launch import sample_rows
from slime_core.errors import UnavailableError
from slime_core.store import layout
from slime_core.store.backend import MemoryBackend
from slime_core.store.documents import put_document
from slime_core.tracking.mlflow import MlflowSettings, MlflowTracker, flattened
from slime_core.tracking.outbox import Outbox, TrackerAway, TrackerRefused
from slime_core.tracking.system import SystemMetrics
from slime_core.waits import poll
from tests.mlflow_server import MlflowServer
from tests.unit.tracking.documents import write_evaluation, write_iteration

PARAMS = {"seed": 7, "lr": 1e-3, "sglang": {"api_key": "hunter2", "tp_size": 1}, "stop": []}


def settings(workspace, **changes) -> MlflowSettings:
    chosen = {"uri": None, "experiment": None, "params": PARAMS, "tags": {"slime.version": "0"}}
    return MlflowSettings.choose(workspace, "run-1", **{**chosen, **changes})


def train(workspace, store, iterations, tracker, folder=None) -> list[str]:
    """Iterations with an evaluation each, until the outbox closes."""
    box = Outbox(folder or workspace / "local", store, trackers=[tracker])
    box.catch_up()
    for k in iterations:
        write_iteration(store, k, reward=k / 8)
        box.iteration(k)
        box.evaluation(write_evaluation(store, k + 1))
    return box.close("FINISHED", 60)


def history(uri, run_id, name) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in MlflowClient(uri).get_metric_history(run_id, name)]


@pytest.fixture(autouse=True)
def no_mlflow_environment(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def test_a_resumed_training_continues_its_mlflow_run(tmp_path):
    store, rows = MemoryBackend(), [{"prompt": "5281=", "response": "1258", "reward": 1.0}]
    first = MlflowTracker(settings(tmp_path), samples=lambda key: rows)
    assert train(tmp_path, store, range(3), first) == []
    changed = settings(tmp_path, params={**PARAMS, "lr": 2e-3})
    second = MlflowTracker(changed, samples=lambda key: rows)
    assert train(tmp_path, store, range(3, 5), second, folder=tmp_path / "other machine") == []

    uri, run_id = changed.uri, second.mlflow_run_id
    assert run_id == first.mlflow_run_id
    assert history(uri, run_id, "rollout/raw_reward") == [(k, k / 8) for k in range(5)]
    assert history(uri, run_id, "eval/sort") == [(k, 0.5) for k in range(1, 6)]
    run = MlflowClient(uri).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.001"
    assert run.data.tags["slime.now.lr"] == "0.002"
    assert run.data.tags["slime.run_id"] == run.info.run_name == "run-1"
    assert "hunter2" not in str(run.to_dictionary())
    table = MlflowClient(uri).download_artifacts(run_id, "samples/a-3/sort.json")
    assert json.loads(Path(table).read_text())["data"] == [["5281=", "1258", 1.0]]
    artifacts = Path(unquote(urlsplit(run.info.artifact_uri).path))
    assert artifacts.is_relative_to(tmp_path)


def test_a_missed_evaluation_stops_nothing_behind_it(tmp_path):
    """Also one that an earlier version wrote, as a line without numbers."""
    store, chosen = MemoryBackend(), settings(tmp_path)
    local = tmp_path / "local"
    local.mkdir()
    old = {"key": "evals/a-0/old", "step": 0, "time_s": 1.0, "metrics": {}}
    (local / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    body = {"dataset": "held", "version": "a-0", "metrics": {}, "missed": "the grader is away"}
    put_document(store, layout.evaluation("a-0", "held"), body)
    tracker = MlflowTracker(chosen, samples=lambda key: sample_rows(store, key))
    assert train(tmp_path, store, range(2), tracker) == []
    run_id = tracker.mlflow_run_id
    assert history(chosen.uri, run_id, "eval/held/missed") == [(0, 1.0)]
    assert history(chosen.uri, run_id, "rollout/raw_reward") == [(0, 0.0), (1, 0.125)]


def test_samples_that_the_store_cannot_give_now_are_asked_for_again(tmp_path):
    """A tracker that ended with an error would get nothing more from the run."""

    class Away(MemoryBackend):
        def get(self, key):
            if not key.endswith(".arrow"):
                return super().get(key)
            raise UnavailableError("the store did not answer")

    with pytest.raises(TrackerAway, match="the store did not answer"):
        sample_rows(Away(), "evals/a-1/sort")


def test_environment_and_configuration_choose_server_experiment_and_run(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path}/theirs.db"
    client = MlflowClient(uri)
    run_id = client.create_run(client.create_experiment("theirs", str(tmp_path))).info.run_id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    assert settings(tmp_path).experiment == "theirs"
    assert settings(tmp_path, experiment="ours").experiment == "ours"
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    tracker = MlflowTracker(settings(tmp_path))
    assert train(tmp_path, MemoryBackend(), range(1), tracker) == []
    assert tracker.mlflow_run_id == run_id
    assert history(uri, run_id, "train/loss") == [(0, 0.5)]


def test_a_run_that_is_not_there_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    with pytest.raises(TrackerRefused, match=r"mlflow.db refuses: .*0000.* not found"):
        MlflowTracker(settings(tmp_path)).connect()


def test_a_guest_adds_records_and_leaves_the_run_as_it_is(tmp_path):
    """`slime eval` writes into the run of a training, which may be going on."""
    store, host = MemoryBackend(), settings(tmp_path)
    tracker = MlflowTracker(host)
    tracker.connect()
    run_id = tracker.mlflow_run_id
    guest = replace(settings(tmp_path, params={**PARAMS, "lr": 9.0}), guest=True)
    for _ in range(2):  # the second finds everything there
        box = Outbox(tmp_path / "guest", store, trackers=[MlflowTracker(guest)])
        box.evaluation(write_evaluation(store, 4))
        assert box.close("FINISHED", 60) == []
    run = MlflowClient(host.uri).get_run(run_id)
    assert run.info.status == "RUNNING" and run.data.params["lr"] == "0.001"
    assert not [tag for tag in run.data.tags if tag.startswith("slime.now")]
    assert train(tmp_path, store, range(5), MlflowTracker(host)) == []
    assert history(host.uri, run_id, "eval/sort") == [(4, 0.5), (1, 0.5), (2, 0.5), (3, 0.5),
                                                      (5, 0.5)]  # fmt: skip


def test_a_guest_without_a_host_has_a_run_of_its_own(tmp_path):
    store, guest = MemoryBackend(), replace(settings(tmp_path), guest=True)
    box = Outbox(tmp_path / "guest", store, trackers=[MlflowTracker(guest)])
    box.evaluation(write_evaluation(store, 4))
    assert box.close("FINISHED", 60) == []
    [run] = MlflowClient(guest.uri).search_runs(["1"])
    assert run.info.status == "FINISHED" and run.data.params["lr"] == "0.001"


def test_secrets_never_become_parameters():
    params = {"api_key": "a", "db": {"user-password": "b"}, "hf_token": "c", "stop_token_ids": [3]}
    assert flattened(params) == {
        "api_key": "***",
        "db.user-password": "***",
        "hf_token": "***",
        "stop_token_ids": "[3]",
    }


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_has_every_value_once(tmp_path):
    server = MlflowServer(tmp_path)
    try:
        server.wait()
        store = MemoryBackend()
        tracker = MlflowTracker(settings(tmp_path, uri=server.uri))
        box = Outbox(tmp_path / "local", store, trackers=[tracker])
        for k in range(3):
            write_iteration(store, k, reward=k / 8)
            box.iteration(k)
        poll("the first records", 60, lambda: tracker.mlflow_run_id)
        server.kill()
        for k in range(3, 6):
            write_iteration(store, k, reward=k / 8)
            box.iteration(k)
        server.start()
        server.wait()
        for k in range(6, 8):
            write_iteration(store, k, reward=k / 8)
            box.iteration(k)
        assert box.close("FINISHED", 90) == []
        found = history(server.uri, tracker.mlflow_run_id, "rollout/raw_reward")
        assert found == [(k, k / 8) for k in range(8)]
    finally:
        server.kill()


@pytest.mark.slow
def test_a_server_gets_load_weights_and_samples_of_a_run(tmp_path, monkeypatch):
    """Artifacts travel through the server, which alone knows their folder."""
    monkeypatch.setattr("slime_core.tracking.system.INTERVAL_S", 0.2)
    server = MlflowServer(tmp_path)
    try:
        server.wait()
        chosen = settings(tmp_path, uri=server.uri, system_metrics=True)
        rows = [{"prompt": "5281=", "response": "1258", "reward": 1.0}]
        tracker = MlflowTracker(chosen, samples=lambda key: rows)
        weights = tmp_path / "final"
        weights.mkdir()
        (weights / "model.safetensors").write_bytes(b"w" * 2_000_000)
        tracker.add_weights(weights)
        assert train(tmp_path, MemoryBackend(), range(1), tracker) == []
        client, run_id = MlflowClient(server.uri), tracker.mlflow_run_id
        assert client.get_run(run_id).info.status == "FINISHED"
        assert history(server.uri, run_id, "system/run_memory_megabytes")[0][1] > 10
        into = str(tmp_path)
        stored = client.download_artifacts(run_id, "weights/model.safetensors", into)
        assert Path(stored).read_bytes() == b"w" * 2_000_000
        table = client.download_artifacts(run_id, "samples/a-1/sort.json", into)
        assert json.loads(Path(table).read_text())["data"] == [["5281=", "1258", 1.0]]
    finally:
        server.kill()


def test_tags_load_and_weights_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("slime_core.tracking.system.INTERVAL_S", 0.2)
    chosen = settings(tmp_path, system_metrics=True)
    tracker = MlflowTracker(chosen)
    weights = tmp_path / "final"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"w")
    tracker.add_tags({"slime.data_digest": "d1"})
    tracker.add_weights(weights)
    assert train(tmp_path, MemoryBackend(), range(1), tracker) == []
    run_id = tracker.mlflow_run_id
    assert MlflowClient(chosen.uri).get_run(run_id).data.tags["slime.data_digest"] == "d1"
    assert len(history(chosen.uri, run_id, "system/cpu_utilization_percentage")) >= 1
    assert history(chosen.uri, run_id, "system/run_memory_megabytes")[0][1] > 10
    stored = MlflowClient(chosen.uri).download_artifacts(run_id, "weights/model.safetensors")
    assert Path(stored).read_bytes() == b"w"


def test_load_that_could_not_be_sent_is_sent_later_once():
    sent, answers = [], iter([False, False])

    def send(time_s, numbers):
        if not next(answers, True):
            raise TrackerAway("away")
        sent.append((time_s, numbers))

    system = SystemMetrics(send, (TrackerAway,), interval_s=0.05)
    system.start()
    poll("what had waited", 20, lambda: len(sent) >= 3 or None)
    system.finish()
    times = [time_s for time_s, _ in sent]
    assert times == sorted(set(times)) and len(times) >= 4
