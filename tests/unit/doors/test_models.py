"""Presets have the dimensions of the published models, and mean the same in every form."""

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from flows.cli.main import main
from slime_core.check.findings import Findings
from slime_core.check.model import check_models
from slime_core.check.options import check_megatron
from slime_core.config.flags import FlagParser, add_flags, overrides_of
from slime_core.config.loading import load_config
from slime_core.doors.command_line import parse
from slime_core.doors.models import preset, presets
from slime_core.errors import ConfigError
from slime_core.megatron.arguments import check_names, resolve
from slime_core.megatron.declared import declared_fields
from slime_core.megatron.settings import TrainerSettings
from slime_core.weights.tables import bind, read_shape
from tests.unit.check.model_folders import QUICKSTART, large_model

ROOT = Path(__file__).parents[3]
TRAINABLE = [name for name, found in presets().items() if not found.waits_for]
DESCRIBED = [name for name, found in presets().items() if found.status != "later"]
PUBLISHED = {  # parameters as the models' pages give them
    "qwen2.5-0.5B": 0.494e9, "qwen2.5-1.5B": 1.544e9, "qwen2.5-3B": 3.086e9,
    "qwen2.5-7B": 7.616e9, "qwen2.5-14B": 14.77e9, "qwen2.5-32B": 32.76e9, "qwen2.5-72B": 72.71e9,
    "qwen3-0.6B": 0.596e9, "qwen3-1.7B": 1.721e9, "qwen3-4B": 4.022e9, "qwen3-8B": 8.191e9,
    "qwen3-14B": 14.77e9, "qwen3-32B": 32.76e9, "qwen3-4B-Instruct-2507": 4.022e9,
    "llama3-8B": 8.03e9, "llama3-70B": 70.6e9, "llama3.1-8B-Instruct": 8.03e9,
    "llama3.1-70B-Instruct": 70.6e9, "llama3.2-1B-Instruct": 1.236e9,
    "llama3.2-3B-Instruct": 3.213e9, "glm4-9B": 9.4e9, "glm-z1-9B": 9.4e9,
    "qwen3-30B-A3B": 30.53e9, "qwen3-235B-A22B": 235.09e9,
}  # fmt: skip


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_preset_has_the_published_number_of_parameters(name):
    assert preset(name).parameters() == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", TRAINABLE)
def test_they_are_the_parameters_of_the_weight_table(name, tmp_path):
    found = preset(name).options()
    config = {"model_type": preset(name).family, "num_hidden_layers": found["num_layers"],
              "hidden_size": found["hidden_size"], "intermediate_size": found["ffn_hidden_size"],
              "num_attention_heads": found["num_attention_heads"],
              "num_key_value_heads": found["num_query_groups"], "head_dim": found["kv_channels"],
              "vocab_size": found["vocab_size"], "max_position_embeddings": 4096,
              "rms_norm_eps": found["norm_epsilon"],
              "tie_word_embeddings": not found["untie_embeddings_and_output_weights"]}  # fmt: skip
    if "num_experts" in found:
        config |= {"num_experts": found["num_experts"],
                   "num_experts_per_tok": found["moe_router_topk"],
                   "moe_intermediate_size": found["moe_ffn_hidden_size"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    entries = bind(read_shape(tmp_path))
    count = sum(math.prod(size) for entry in entries for size in entry.hf_shapes)
    assert preset(name).parameters() == count


@pytest.mark.parametrize("name", DESCRIBED)
def test_its_options_are_megatrons_and_its_file_is_shipped(name):
    if name in TRAINABLE:
        check_names(preset(name).options())
    path = ROOT / "configs" / "models" / f"{name}.yaml"
    again = "slime models export --all configs/models --format yaml"
    assert path.read_text() == preset(name).yaml(), f"made anew by: {again}"


def test_every_shipped_file_is_a_preset():
    assert {path.stem for path in (ROOT / "configs" / "models").iterdir()} == set(DESCRIBED)


def test_bash_and_yaml_mean_the_same():
    script = preset("qwen2.5-7B").bash() + 'printf "%s\\n" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}"'
    words = subprocess.run(
        ["bash", "-c", script], env={"HF_CHECKPOINT": "m m"}, capture_output=True, check=True
    ).stdout.decode().splitlines()  # fmt: skip
    parser = FlagParser(prog="slime train")
    add_flags(parser)
    given = overrides_of(parse(parser, words))
    assert given["hf_checkpoint"] == "m m"
    options = yaml.safe_load(preset("qwen2.5-7B").yaml())["megatron"]
    assert given["megatron"] == {name: value for name, value in options.items() if value}


def test_a_preset_of_the_model_passes_and_another_is_told_with_every_difference(tmp_path):
    folder = large_model(tmp_path / "m")

    def problems(name: str) -> list[str]:
        config = load_config(
            {"extends": str(ROOT / "configs" / "models" / f"{name}.yaml"), **_tree()},
            {"hf_checkpoint": str(folder)},
        )
        findings = Findings()
        shape = check_models(config, findings)
        check_megatron(config, "cpu", shape, findings)
        return findings.problems

    found = "\n".join(problems("qwen3-8B"))
    assert "'hidden_size' is 4096, but the model's config.json makes it 2560" in found
    assert "'ffn_hidden_size' is 12288" in found
    assert "'untie_embeddings_and_output_weights' is True" in found
    assert problems("qwen3-4B") == []


def _tree() -> dict:
    tree = yaml.safe_load(QUICKSTART.read_text())
    return {group: tree[group] for group in ("run", "data", "rollout", "rewards")}


def test_models_that_wait_for_something_say_so():
    with pytest.raises(ConfigError, match="glm4-32B is not there yet, it waits for: a layer of"):
        preset("glm4-32b").options()
    with pytest.raises(ConfigError, match=r"unknown model qwen3-4: did you mean qwen3-4B\?"):
        preset("qwen3-4")
    assert {"deepseek-v3", "glm-z1-9B", "glm4.5-106B-A12B"} <= set(presets()) - set(TRAINABLE)


def test_models_of_other_layers_have_their_options_before_they_can_be_trained(tmp_path):
    glm, moe = preset("glm4-9B").options(), preset("qwen3-30B-A3B").options()
    assert (glm["rotary_percent"], glm["rotary_interleaved"], glm["add_qkv_bias"]) == (0.5, 1, 1)
    assert glm["post_self_attn_layernorm"] and glm["post_mlp_layernorm"]
    assert (moe["num_experts"], moe["moe_router_topk"], moe["moe_ffn_hidden_size"]) == (128, 8, 768)
    text = preset("glm-z1-9B").bash()
    assert "MODEL_ARGS=(" in text and "--rotary-percent 0.5\n" in text and "CKPT_ARGS=(" in text
    path = ROOT / "configs" / "models" / "glm4-9B.yaml"
    with pytest.raises(ConfigError, match="post_mlp_layernorm is not there yet, it waits for"):
        load_config({"extends": str(path), **_tree()}, {})


def test_the_command_lists_shows_and_exports(tmp_path, capsys):
    assert main(["models", "list"]) == 0
    shown = capsys.readouterr().out
    assert "qwen3-4B                4.02B" in shown and "later: mixture-of-experts" in shown
    assert main(["models", "show", "qwen3-4B"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["megatron"]["num_layers"] == 36
    assert main(["models", "export", "--all", str(tmp_path)]) == 0
    assert (tmp_path / "qwen3-4B.sh").read_text() == preset("qwen3-4B").bash()
    assert len(list(tmp_path.iterdir())) == len(DESCRIBED)
    assert main(["models", "export"]) == 2


@pytest.mark.parametrize("more", [["qwen3-4B"], ["--all", "x"], ["--format", "yaml"]])
def test_a_list_takes_nothing_else(more, capsys):
    assert main(["models", "list", *more]) == 2
    output = capsys.readouterr()
    assert not output.out and "give it nothing else" in output.err


def test_a_rope_scaling_is_compared_with_the_models(tmp_path):
    folder = large_model(tmp_path / "m")
    shape = read_shape(folder)
    options = {"use_rope_scaling": True, "rope_scaling_factor": 32.0}
    settings = TrainerSettings(hf_checkpoint=str(folder), megatron=options)
    scaled = replace(shape, rope_type="llama3", rope_factor=32.0)
    assert not resolve(settings, scaled, declared_fields()).without_effect
    with pytest.raises(ConfigError, match=r"'rope_scaling_factor' is 32\.0.* makes it 8\.0"):
        resolve(settings, replace(scaled, rope_factor=8.0), declared_fields())
    with pytest.raises(ConfigError, match="'use_rope_scaling' is True"):
        resolve(settings, shape, declared_fields())


def test_files_that_say_otherwise_are_replaced_only_when_told_to(tmp_path, capsys):
    export = ["models", "export", "--all", str(tmp_path)]
    assert main(export) == 0 and main(export) == 0, "the same again changes nothing"
    own = tmp_path / "qwen3-4B.sh"
    own.write_text("MODEL_ARGS=(--mine)")
    (tmp_path / "qwen3-8B.sh").unlink()
    capsys.readouterr()
    assert main(export) == 2
    assert (
        "say otherwise: qwen3-4B.sh; give another folder, or --overwrite" in capsys.readouterr().err
    )
    assert own.read_text() == "MODEL_ARGS=(--mine)" and not (tmp_path / "qwen3-8B.sh").exists()
    assert main([*export, "--overwrite"]) == 0
    assert own.read_text() == preset("qwen3-4B").bash()
    assert main(["models", "show", "qwen3-4B", "--overwrite"]) == 2


def test_a_folder_that_cannot_be_written_and_a_name_beside_all_are_sentences(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["models", "export", "--all", str(tmp_path / "file" / "x")]) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err
    assert main(["models", "export", "qwen3-4B", "--all", str(tmp_path / "all")]) == 2
    assert "--all writes every model" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()
