"""Blocks: what they name, what `check()` finds, and where their secrets go."""

import asyncio
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import SecretStr

from blocks import ALL, GraderSecrets, RayCluster, SampleStore, SGLangEndpoints, Tracking
from blocks.resolve import KINDS, resolve
from slime_core.config.block_names import FIELDS, blocks_in
from slime_core.config.loading import load_config
from slime_core.errors import ConfigError, EngineError, StoreError

SECRET = "s3cret-and-never-shown"
BASE = {
    "run": {"num_rollout": 1},
    "data": {"prompt_data": "p.jsonl", "label_key": "label"},
    "rollout": {"hf_checkpoint": "m", "rollout_batch_size": 1, "rollout_max_response_len": 8},
    "rewards": {"rm_type": "exact_match"},
}


def config(**values):
    return load_config(BASE, values)


@contextmanager
def server(status: int):
    """Answers every GET with a status; gives its address and the headers that it saw."""
    seen: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers.get("Authorization")))
            self.send_response(status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}", seen
    finally:
        http.shutdown()
        http.server_close()


@pytest.mark.parametrize("kind", ALL)
def test_every_block_has_a_name_a_slug_and_a_description(kind):
    assert kind._block_type_name.startswith("slime ")
    assert kind.get_block_type_slug().startswith("slime-")
    assert kind.get_description()
    assert callable(kind.check)


def test_a_store_is_checked_by_writing(tmp_path):
    assert "only once" in SampleStore(url=str(tmp_path / "store")).check()
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        SampleStore(url=str(tmp_path / "file" / "store")).check()


def test_mlflow_is_asked_with_the_token():
    with server(200) as (url, seen):
        assert "answers" in Tracking(uri=url, token=SecretStr(SECRET)).check()
    path, authorization = seen[0]
    assert path.startswith("/api/2.0/mlflow/experiments/search")
    assert authorization == f"Bearer {SECRET}"


@pytest.mark.parametrize(("status", "word"), [(401, "refuses the token"), (500, "answers with")])
def test_an_mlflow_that_says_no_is_named_without_the_token(status, word):
    with server(status) as (url, _), pytest.raises(ConfigError, match=word) as raised:
        Tracking(uri=url, token=SecretStr(SECRET)).check()
    assert SECRET not in str(raised.value)


def test_an_mlflow_that_is_away_is_named():
    with server(200) as (url, _):
        pass
    with pytest.raises(ConfigError, match=f"{url} does not answer"):
        Tracking(uri=url).check()


def test_an_mlflow_database_needs_a_folder_to_write(tmp_path):
    assert "can be written" in Tracking(uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db").check()
    with pytest.raises(ConfigError, match="only http"):
        Tracking(uri="postgresql://x").check()


def test_every_engine_is_asked():
    with server(200) as (well, seen), server(503) as (ill, _):
        assert "2 engines" in SGLangEndpoints(urls=[well, well + "/"]).check()
        assert [path for path, _ in seen] == ["/health", "/health"]
        with pytest.raises(EngineError, match=f"{ill} answers /health with 503"):
            SGLangEndpoints(urls=[well, ill]).check()


def test_a_ray_cluster_says_what_a_run_would_do():
    assert "Ray of its own" in RayCluster().check()
    with pytest.raises(ConfigError, match=r"ray://head:10001: .*on a node of its cluster"):
        RayCluster(address="ray://head:10001").check()
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 cannot be reached"):
        RayCluster(address="127.0.0.1:1").check()


@pytest.mark.parametrize("name", ["1A", "A-B", "", "PATH", "LD_PRELOAD", "PYTHONPATH"])
def test_a_grader_secret_needs_a_free_name(name):
    with pytest.raises(ConfigError, match="use another name"):
        GraderSecrets(entries={name: SecretStr("x")}).check()


def test_an_empty_grader_secret_is_named():
    with pytest.raises(ConfigError, match="without a value: JUDGE_KEY"):
        GraderSecrets(entries={"JUDGE_KEY": SecretStr("")}).check()


def test_blocks_do_not_show_their_secrets():
    for block in (
        SampleStore(url="s3://b", secret_access_key=SecretStr(SECRET)),
        Tracking(uri="http://m", token=SecretStr(SECRET)),
        GraderSecrets(entries={"JUDGE_KEY": SecretStr(SECRET)}),
    ):
        assert SECRET not in f"{block!r} {block} {block.model_dump_json()}"


def test_places_go_into_the_configuration_and_secrets_into_the_environment():
    stored = {
        "prod": SampleStore(
            url="s3://bucket/runs", endpoint_url="http://minio:9000",
            access_key_id=SecretStr("me"), secret_access_key=SecretStr(SECRET),
        ),
        "team": Tracking(uri="http://mlflow", experiment="sorting", token=SecretStr(SECRET)),
        "judge": GraderSecrets(entries={"JUDGE_KEY": SecretStr(SECRET)}),
    }  # fmt: skip

    async def load(kind, name):
        assert isinstance(stored[name], kind)
        return stored[name]

    given = config(
        store_url="block:prod", mlflow_tracking_uri="block:team", grader_secrets="block:judge"
    )
    found = asyncio.run(resolve(given, load))
    assert found.config.store.store_url == "s3://bucket/runs"
    assert found.config.tracking.mlflow_tracking_uri == "http://mlflow"
    assert found.config.tracking.mlflow_experiment_name == "sorting"
    assert found.environment == {
        "AWS_ENDPOINT_URL": "http://minio:9000",
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "MLFLOW_TRACKING_TOKEN": SECRET,
        "JUDGE_KEY": SECRET,
    }
    assert SECRET not in repr(found) and SECRET not in found.config.model_dump_json()


def test_the_configuration_goes_before_the_block():
    async def load(kind, name):
        return Tracking(uri="http://mlflow", experiment="of the block")

    given = config(mlflow_tracking_uri="block:team", mlflow_experiment_name="mine")
    assert asyncio.run(resolve(given, load)).config.tracking.mlflow_experiment_name == "mine"


def test_without_blocks_nothing_is_loaded():
    async def load(kind, name):
        raise AssertionError("nothing is named")

    given = config()
    assert asyncio.run(resolve(given, load)).config is given


def test_fields_that_take_a_block_have_a_kind():
    assert set(KINDS) == set(FIELDS)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"hf_checkpoint": "block:x"}, "hf_checkpoint: block:x: only store_url"),
        ({"sglang": {"api_key": "block:x"}}, "sglang: block:x: only store_url"),
        ({"grader_secrets": "my-key"}, "grader_secrets takes block:NAME"),
    ],
)
def test_other_fields_take_no_block(values, sentence):
    with pytest.raises(ConfigError, match=sentence):
        blocks_in(config(**values))
