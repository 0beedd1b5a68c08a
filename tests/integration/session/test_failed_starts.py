"""A start that fails in the middle leaves nothing running and gives the run back."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray

from slime_core.cluster import engine_maker
from slime_core.cluster.session import Session
from slime_core.cluster.trainer_group import TrainerGroup
from slime_core.errors import ConfigError, EngineError, SlimeError, StoreError, TrainerError
from slime_core.run.epoch import Lease, newest_epoch
from slime_core.store.backend import open_backend
from tests.integration.session.driver import config_of

MODEL = Path(__file__).parents[3] / "configs/quickstart/model"


@pytest.fixture
def nothing_left() -> Callable[[], None]:
    """Checks that no child process, Ray or log handler is there that was not there before."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    handlers = list(logging.getLogger("slime_core").handlers)

    def check() -> None:
        children = psutil.Process().children(recursive=True)
        new = [c for c in children if c.pid not in before and c.status() != psutil.STATUS_ZOMBIE]
        assert new == []
        assert not ray.is_initialized()
        assert logging.getLogger("slime_core").handlers == handlers

    return check


def given_back(workspace: Path) -> bool:
    """The run's last owner has ended: the next start need not wait."""
    newest = newest_epoch(open_backend(str(workspace / "store" / "r")))
    return newest is not None and newest.ended


def test_a_folder_that_is_no_model_is_refused_before_anything_starts(tmp_path, nothing_left):
    config = config_of(str(tmp_path), 1, hf_checkpoint=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"no config\.json there"):
        Session.start(config, "r")
    nothing_left()
    assert newest_epoch(open_backend(str(tmp_path / "store" / "r"))) is None


def test_a_workspace_that_is_a_file_is_one_sentence(tmp_path, nothing_left):
    (tmp_path / "file").write_text("")
    with pytest.raises(SlimeError, match=r"file.* cannot be written"):
        Session.start(config_of(str(tmp_path / "file"), 1), "r")
    nothing_left()


def test_another_identity_is_refused_and_nothing_is_held(tmp_path, nothing_left, monkeypatch):
    def stop(self: Session) -> None:
        raise TrainerError("far enough")

    monkeypatch.setattr(Session, "_start_processes", stop)
    with pytest.raises(TrainerError):
        Session.start(config_of(str(tmp_path), 1), "r")
    with pytest.raises(ConfigError, match="seed was 1, now 2"):
        Session.start(config_of(str(tmp_path), 1, seed=2), "r")
    nothing_left()
    assert given_back(tmp_path)


def test_a_start_inside_a_running_loop_shows_its_own_error(tmp_path, nothing_left, monkeypatch):
    """A flow that a Prefect worker started has a loop already."""

    def stop(self: Session) -> None:
        raise TrainerError("far enough")

    async def body() -> None:
        Session.start(config_of(str(tmp_path), 1), "r")

    monkeypatch.setattr(Session, "_start_processes", stop)
    with pytest.raises(TrainerError, match="far enough"):
        asyncio.run(body())
    nothing_left()
    assert given_back(tmp_path)


def test_a_run_with_a_living_owner_is_refused_and_left_to_it(tmp_path, nothing_left):
    backend = open_backend(str(tmp_path / "store" / "r"))
    with Lease.acquire(backend, ttl_s=5) as owner:
        with pytest.raises(StoreError, match=r"belongs to process \d+ on"):
            Session.start(config_of(str(tmp_path), 1), "r")
        owner.guard()
    nothing_left()


def test_somebody_elses_ray_is_never_touched(tmp_path, nothing_left, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: True)
        patch.setattr(ray, "shutdown", lambda: pytest.fail("it is not ours"))
        with pytest.raises(ConfigError, match="Ray is in use in this process already"):
            Session.start(config_of(str(tmp_path), 1), "r")
    nothing_left()  # the engines had been started before
    assert given_back(tmp_path)


@pytest.mark.slow
def test_a_failure_after_ray_is_up_ends_ray_and_engines(tmp_path, nothing_left, monkeypatch):
    def start(self: TrainerGroup) -> None:
        assert ray.is_initialized()
        raise TrainerError("no actor could be made")

    monkeypatch.setattr(TrainerGroup, "start", start)
    with pytest.raises(TrainerError, match="no actor could be made"):
        Session.start(config_of(str(tmp_path), 1), "r")
    nothing_left()
    assert given_back(tmp_path) and not (tmp_path / "local" / "r" / "ray-folder").exists()


def started(workspace: Path, **overrides: object) -> SlimeError:
    """The error of a start that does not get ready, after it was closed."""
    session = Session.start(config_of(str(workspace), 1, **overrides), "r")

    async def body() -> SlimeError:
        try:
            with pytest.raises(SlimeError) as error:
                await session.ready()
            return error.value
        finally:
            await session.close("failed")

    return asyncio.run(body())


@pytest.mark.slow  # two starts up to their end
def test_a_taken_port_and_a_model_without_weights_are_named(tmp_path, nothing_left, monkeypatch):
    """Two starts, one after the other in one process: the first leaves nothing in the way."""
    with socket.create_server(("127.0.0.1", 0)) as taken:

        class TakenPort:
            number = taken.getsockname()[1]

            def __init__(self, host: str) -> None:
                assert host == "127.0.0.1"

            def release(self) -> None:
                return

        with monkeypatch.context() as patch:
            patch.setattr(engine_maker, "HeldPort", TakenPort)
            error = started(tmp_path / "a")
    assert isinstance(error, EngineError)
    assert f"port {TakenPort.number} on 127.0.0.1 cannot be used" in str(error)
    nothing_left()
    assert given_back(tmp_path / "a")

    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    error = started(tmp_path / "b", hf_checkpoint=str(tmp_path / "model"))
    assert str(tmp_path / "model") in str(error), error
    nothing_left()
    assert given_back(tmp_path / "b")
