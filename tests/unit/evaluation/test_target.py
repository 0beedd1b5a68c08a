"""What `slime eval` takes for its target, and what it says to what is none."""

import asyncio
import json

import pytest

from slime_core.errors import ConfigError
from slime_core.evaluation.target import Place, find_target, model_digest
from slime_core.run.identity import record_run
from slime_core.run.recover import recover
from slime_core.stages.train import train
from slime_core.store.backend import open_backend
from tests.unit.stages.standins import Lab, packed

EVAL = {"eval_prompt_data": ["held", "held.jsonl"]}
BARE = {"rm_type": "random", "eval_max_response_len": 4}


@pytest.fixture
def place(tmp_path):
    return Place(str(tmp_path / "runs"))


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def run(tmp_path):
    """A stored run of two iterations, below a store of its own."""
    ctx = Lab(tmp_path, num_rollout=2, save_interval=1).start()
    root = open_backend(ctx.backend.url.rpartition("/")[0])
    record_run(root, ctx.backend, ctx.config, ctx.run_id)
    asyncio.run(recover(ctx))
    for k in range(2):
        asyncio.run(train(ctx, packed(ctx, k)))
    return ctx


def of_run(run, given, version=None, overrides=EVAL):
    url = run.backend.url.rpartition("/")[0]
    return find_target(given, version, None, overrides, Place(run.config.run.workspace, url))


def test_a_run_means_its_newest_weights_or_those_asked_for(run):
    newest = of_run(run, "last")
    assert (newest.owner, newest.version, newest.iterations) == (run.run_id, "l0-2", 2)
    assert newest.model is None and newest.config.eval.eval_prompt_data == ["held", "held.jsonl"]
    for version in ("1", "l0-1"):
        assert of_run(run, run.run_id[:3], version).version == "l0-1"
    assert of_run(run, "last", "0").version == "l0-0"
    for wrong in ("3", "new", "-1", "l9-1"):
        with pytest.raises(ConfigError, match=f"has no (version|weights) {wrong}"):
            of_run(run, "last", wrong)
    with pytest.raises(ConfigError, match="run nobody is not in"):
        of_run(run, "nobody")
    with pytest.raises(ConfigError, match="nothing to evaluate on: give --eval-config"):
        of_run(run, "last", overrides={})


def test_a_folder_in_the_store_is_its_run_or_its_checkpoint(run, place):
    folder = run.backend.url.removeprefix("file://")
    assert find_target(folder, None, None, EVAL, place).version == "l0-2"
    checkpoint = f"{folder}/checkpoints/000000-{run.lease.epoch:06d}"
    found = find_target(checkpoint, None, None, EVAL, place)
    assert (found.owner, found.version) == (run.run_id, "l0-1")
    with pytest.raises(ConfigError, match="is one version already"):
        find_target(checkpoint, "1", None, EVAL, place)


def test_a_model_is_named_after_its_content(model, place):
    found = find_target(str(model), None, None, {**EVAL, **BARE}, place)
    digest = model_digest(model)[:12]
    assert (found.owner, found.version) == (f"model-a-model-{digest}", f"{digest}-0")
    assert found.model == model and found.config.rollout.hf_checkpoint == str(model)
    (model / "notes.md").write_text("no part of it")
    assert model_digest(model).startswith(digest)
    (model / "model.safetensors").write_bytes(b"others.")
    assert not model_digest(model).startswith(digest)


def test_what_is_neither_is_told_in_a_sentence(model, place, tmp_path):
    def refused(given, match, version=None, overrides=EVAL | BARE):
        with pytest.raises(ConfigError, match=match):
            find_target(given, version, None, overrides, place)

    refused(str(tmp_path / "none" / "x"), "is missing: give a run's id")
    refused(str(tmp_path), "holds no config.json, run.json or manifest.json")
    refused("last", "neither a folder nor a run: there is no store in")
    refused(str(model), "is a model, which has no versions", version="3")
    refused(str(model), "nothing to evaluate on", overrides=BARE)
    refused(str(model), "rollout_max_response_len is missing", overrides=EVAL)
    refused(str(model), "set rm_type", overrides=EVAL | {"eval_max_response_len": 4})
