"""What the trainer's ranks are told follows from the configuration and the model."""

import json
from pathlib import Path
from typing import Any

import pytest

from slime_core.cluster.trainer_settings import model_facts, trainer_settings, training_dtype
from slime_core.errors import ConfigError
from tests.unit.config.trees import small


def model(folder: Path, **config: Any) -> str:
    facts = {"vocab_size": 100, "max_position_embeddings": 256, "model_type": "qwen3", **config}
    (folder / "config.json").write_text(json.dumps(facts))
    return str(folder)


def test_facts_of_a_model(tmp_path):
    facts = model_facts(model(tmp_path, dtype="float32"))
    assert facts == {
        "vocab_size": 100, "max_positions": 256, "dtype": "float32", "model_type": "qwen3",
    }  # fmt: skip
    assert model_facts(model(tmp_path, torch_dtype="bfloat16"))["dtype"] == "bfloat16"
    assert model_facts(model(tmp_path))["dtype"] == "bfloat16"


def test_a_folder_that_is_no_model_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json there; give the folder of a Hugging"):
        model_facts(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        model_facts(str(tmp_path))
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(ConfigError, match="max_position_embeddings is missing"):
        model_facts(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "of_model", "expected"),
    [
        ({}, "float32", "float32"),
        ({}, "bfloat16", "bfloat16"),
        ({"bf16": True}, "float32", "bfloat16"),
        ({"bf16": False}, "bfloat16", "float32"),
    ],
)
def test_the_precision_is_the_models_unless_megatrons_option_says_so(options, of_model, expected):
    assert training_dtype(small(megatron=options), of_model) == expected


def test_fp16_is_refused():
    with pytest.raises(ConfigError, match="fp16 is not there yet"):
        training_dtype(small(megatron={"fp16": True}), "float32")


def test_a_ranks_settings(tmp_path):
    folder = model(tmp_path, dtype="float32")
    config = small(
        hf_checkpoint=folder, seed=7, lr=0.5, num_rollout=10, num_steps_per_rollout=2,
        threads_per_process=3,
        megatron={"weight_decay": 0.1, "bf16": False}, sglang={"api_key": "sk-1"},
    )  # fmt: skip
    settings = trainer_settings(config, "cpu", 0, 4242)
    assert (settings.hf_checkpoint, settings.device, settings.dtype) == (folder, "cpu", "float32")
    assert (settings.rank, settings.world_size, settings.master_port) == (0, 1, 4242)
    assert (settings.seed, settings.lr, settings.threads) == (7, 0.5, 3)
    assert settings.train_iters == 20, "optimizer steps, not iterations"
    assert settings.args is not None and settings.args.lr == 0.5, "functions of the user's see it"
    assert settings.args.sglang_api_key == "***", "they cannot print it"
    assert settings.megatron == {"weight_decay": 0.1}, "bf16 has become the dtype"


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ({"num_rollout": 3}, 3),
        ({"num_rollout": 0}, 1),
        ({"num_rollout": 3, "megatron": {"lr_warmup_iters": 10}}, 11),
        ({"num_rollout": 3, "megatron": {"lr_warmup_iters": 10, "lr_decay_style": "cosine"}}, 3),
    ],
)
def test_steps_of_the_run(tmp_path, overrides, steps):
    config = small(hf_checkpoint=model(tmp_path), **overrides)
    assert trainer_settings(config, "cpu", 0, 1).train_iters == steps
