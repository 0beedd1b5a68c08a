"""A run that lives on S3: killed on one machine, taken up on another, sound in the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_core.run.audit import audit
from slime_core.store.backend import Backend, open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.checkpoints import list_checkpoints
from slime_core.store.verify import verify_run
from tests.e2e.runs import RunFolder, finish, kill_when_held, start
from tests.s3 import BUCKET, ENVIRONMENT, moto_server

ROWS = sum(1 for _ in (Path(__file__).parents[2] / "configs/quickstart/train.jsonl").open())


@pytest.fixture
def store_url(monkeypatch: pytest.MonkeyPatch):
    with moto_server() as url:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        yield f"s3://{BUCKET}/team"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_from_s3_on_another_machine(store_url: str, tmp_path: Path) -> None:
    flags = (
        *("--store-url", store_url, "--no-prefect", "--save-interval", "2"),
        *("--num-rollout", "5", "--eval-interval", "100", "--skip-eval-before-train"),
        "--sglang-enable-deterministic-inference",
    )
    one, other, untouched = (RunFolder(tmp_path / name, "moved") for name in ("1", "2", "3"))
    kill_when_held(start(one, *flags, hold_at="train-middle@3"), one, "train-middle@3")
    assert not one.store.exists(), "nothing durable stands in the workspace"

    output = finish(start(other, *flags), other)
    again = "the checkpoint after iteration 1, and 1 iteration trained again from the store"
    assert re.search(rf"trainer +{again}\n", output), output
    fetched = other.workspace / "local/moved/cache/checkpoints"
    assert {path.name for path in fetched.iterdir()} == {"000003-000001", "000004-000001"}

    backend = open_backend(f"{store_url}/moved")
    assert verify_run(NodeCache(backend)) == []
    assert [checkpoint.iteration for checkpoint in list_checkpoints(backend)] == [4, 3]
    found = audit(mirrored(backend, tmp_path / "mirror"), dataset_rows=ROWS)
    assert found.sound, found.problems
    assert (found.iterations, found.open) == (5, 0)

    finish(start(untouched, *flags[2:]), untouched)
    assert audit(untouched.store).final_state == found.final_state


def mirrored(backend: Backend, folder: Path) -> Path:
    """A copy of a run as a local store has it."""
    for entry in backend.list():
        path = folder / entry.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(backend.get(entry.key))
    return folder
