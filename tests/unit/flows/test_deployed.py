"""A deployment's run: its parameters, checked before anything starts, and the state it ends in."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from uuid import UUID

import pytest
import yaml
from prefect.exceptions import Abort

from flows import deployed as module
from flows import stop
from flows.deployed import configuration
from flows.parameters import as_text
from flows.services.environment import WORKSPACE
from flows.train import train
from slime_core.config.fields import identity_digest
from slime_core.config.loading import load_config
from slime_core.errors import ConfigError, TrainerError
from slime_core.run.identity import RunChoice
from tests.e2e.runs import QUICKSTART, ROOT


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv(WORKSPACE, raising=False)


@pytest.fixture(autouse=True)
def no_late_kill():
    """A stopper's deadline outlives the run by design; it must not outlive the test."""
    yield
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.cancel()


def entry(name: str) -> dict:
    content = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    return next(item for item in content["deployments"] if item["name"] == name)


def test_the_deployment_trains_what_the_file_does():
    parameters = entry("quickstart")["parameters"]
    deployed = configuration(parameters["config"], parameters["overrides"])
    assert deployed == load_config(QUICKSTART, {})
    assert identity_digest(deployed) == identity_digest(load_config(QUICKSTART, {}))


def test_every_entry_takes_the_parameters_that_its_flow_has():
    schema = train.parameters
    assert set(entry("quickstart")["parameters"]) <= set(schema.properties)


def test_the_form_shows_what_a_field_means():
    definitions = train.parameters.definitions
    run = definitions["RunGroup"]["properties"]
    assert run["num_rollout"]["description"].startswith("Iterations to train.")
    assert definitions["TrainGroup"]["properties"]["lr"]["default"] == 1e-6
    whole = definitions["RunConfig"]["properties"]
    assert whole["megatron"]["type"] == whole["sglang"]["type"] == "object"
    assert whole["megatron"]["description"].startswith("Megatron's options")
    assert "single values over it" in train.parameters.properties["overrides"]["description"]


def test_a_wrong_key_is_a_sentence():
    parameters = entry("quickstart")["parameters"]["config"]
    with pytest.raises(ConfigError, match=r"unknown option lrr.*did you mean lr"):
        configuration(parameters, {"lrr": 1.0})
    with pytest.raises(ConfigError, match="num_rolout"):
        configuration({**parameters, "run": {"num_rolout": 3}}, {})


@pytest.mark.parametrize(
    ("config", "overrides", "sentence"),
    [
        ("quickstart.yaml", {}, "config must be a JSON object.*not 'quickstart.yaml'"),
        ({}, [1], r"overrides must be a JSON object.*not \[1\]"),
    ],
)
def test_a_parameter_of_a_wrong_type_is_a_sentence(config, overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        configuration(config, overrides)


def test_a_number_is_taken_where_a_text_is_wanted():
    assert as_text("version", 3) == as_text("version", "3") == "3"
    for value in (True, 1.5, None, ["3"]):
        with pytest.raises(ConfigError, match="version must be text"):
            as_text("version", value)


def test_a_tree_may_extend_a_file():
    extended = configuration({"extends": "./configs/quickstart.yaml"}, {"lr": 1e-4})
    assert extended == load_config(QUICKSTART, {"lr": 1e-4})


def test_runs_live_in_the_workspace_of_the_services(monkeypatch, tmp_path):
    parameters = entry("quickstart")["parameters"]["config"]
    assert configuration(parameters, {}).run.workspace == "runs"
    monkeypatch.setenv(WORKSPACE, str(tmp_path))
    assert configuration(parameters, {}).run.workspace == str(tmp_path)
    assert configuration(parameters, {"workspace": "elsewhere"}).run.workspace == "elsewhere"


@dataclass
class Started:
    """Stands for a launch: remembers how it was closed."""

    run_id: str = "run-1"
    closed: list[str] = field(default_factory=list)

    async def close(self, reason: str) -> None:
        self.closed.append(reason)

    def release(self) -> None:
        raise AssertionError("close does that")


@pytest.fixture
def started(monkeypatch):
    """Nothing is started, and nothing is killed where a stop takes long."""
    launch = Started()
    choice = RunChoice("run-1", False, "starting run run-1")
    monkeypatch.setattr(module, "choose", lambda config, resume: choice)
    monkeypatch.setattr(module, "require", lambda config: [])
    monkeypatch.setattr(module.Launch, "start", lambda *_, **__: launch)
    monkeypatch.setattr(stop, "kill_everything", lambda *_: None)
    monkeypatch.delenv("PREFECT__WORKER_ID", raising=False)
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    return launch


def end_of(training):
    parameters = entry("quickstart")["parameters"]["config"]
    return asyncio.run(module.deployed(parameters, {}, "auto", training))


def test_a_training_that_ends_is_completed(started):
    async def training(launch):
        assert launch is started

    state = end_of(training)
    assert state.is_completed() and "run-1 is finished" in state.message
    assert started.closed


@pytest.mark.parametrize("noise", [False, True])
def test_a_training_that_is_stopped_is_cancelled_whatever_the_stop_tears_down(started, noise):
    async def training(_):
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            if noise:
                raise TrainerError("its process ended") from None
            raise

    before = signal.getsignal(signal.SIGTERM)
    state = end_of(training)
    assert state.is_cancelled() and "slime resume" in state.message
    assert started.closed
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_during_the_start_ends_the_run_as_cancelled(started, monkeypatch):
    """Nobody but this process can say so: a kill would leave the flow run Running."""

    def start(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        return started

    async def training(_):
        raise AssertionError("it must not begin")

    monkeypatch.setattr(stop, "kill_everything", lambda *_: pytest.fail("it was killed"))
    monkeypatch.setattr(module.Launch, "start", start)
    assert end_of(training).is_cancelled()
    assert started.closed == ["interrupted"]


def test_after_a_signal_nothing_is_started(started, monkeypatch):
    def told(config):
        os.kill(os.getpid(), signal.SIGTERM)
        return []

    monkeypatch.setattr(stop, "kill_everything", lambda *_: pytest.fail("it was killed"))
    monkeypatch.setattr(module, "require", told)
    monkeypatch.setattr(module.Launch, "start", lambda *_, **__: pytest.fail("it was started"))
    assert end_of(None).is_cancelled()


def test_the_worker_says_that_a_run_was_cancelled(started, monkeypatch):
    """Prefect's worker would undo a retry that comes before it has said so."""

    async def training(_):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(30)

    async def yes(_):
        return True

    monkeypatch.setenv("PREFECT__WORKER_ID", "w")
    monkeypatch.setattr(module, "is_cancelled", yes)
    monkeypatch.setattr(module, "flow_run", SimpleNamespace(id=UUID(int=1), run_count=1, tags=[]))
    with pytest.raises(Abort):
        end_of(training)
    assert started.closed


def test_a_failure_stays_one(started):
    async def training(_):
        raise TrainerError("out of memory")

    with pytest.raises(TrainerError, match="out of memory"):
        end_of(training)
    assert started.closed


def test_outside_of_the_main_thread_a_training_runs_without_signals(started):
    async def training(_):
        pass

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(end_of, training).result().is_completed()


def test_a_run_that_is_finished_starts_nothing(started, monkeypatch):
    finished = RunChoice("run-1", True, "run run-1 is finished (60 of 60 iterations)", True)
    monkeypatch.setattr(module, "choose", lambda config, resume: finished)

    async def training(_):
        raise AssertionError("there is nothing to do")

    assert end_of(training).message == finished.sentence
    assert not started.closed


@pytest.mark.parametrize(
    ("count", "tags", "wanted"),
    [
        (1, ["slime", "run:run-7"], "auto"),
        (2, ["slime", "run:run-7"], "run-7"),
        (2, ["slime"], "auto"),
        (None, None, "auto"),
    ],
)
def test_a_retry_means_the_run_that_it_had(monkeypatch, count, tags, wanted):
    monkeypatch.setattr(module, "flow_run", SimpleNamespace(run_count=count, tags=tags))
    assert module._which("auto") == wanted
