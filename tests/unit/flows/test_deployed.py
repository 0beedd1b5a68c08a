"""Parameters of a deployment: checked before anything starts, and the same run as from a file."""

import pytest
import yaml

from flows.deployed import configuration
from flows.services.environment import WORKSPACE
from flows.train import train
from slime_core.config.fields import identity_digest
from slime_core.config.loading import load_config
from slime_core.errors import ConfigError
from tests.e2e.runs import QUICKSTART, ROOT


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv(WORKSPACE, raising=False)


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


def test_a_tree_may_extend_a_file():
    extended = configuration({"extends": "./configs/quickstart.yaml"}, {"lr": 1e-4})
    assert extended == load_config(QUICKSTART, {"lr": 1e-4})


def test_runs_live_in_the_workspace_of_the_services(monkeypatch, tmp_path):
    parameters = entry("quickstart")["parameters"]["config"]
    assert configuration(parameters, {}).run.workspace == "runs"
    monkeypatch.setenv(WORKSPACE, str(tmp_path))
    assert configuration(parameters, {}).run.workspace == str(tmp_path)
    assert configuration(parameters, {"workspace": "elsewhere"}).run.workspace == "elsewhere"
