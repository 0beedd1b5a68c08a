"""A launch script becomes a configuration; nothing of it is lost without a word."""

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
import yaml

from flows.cli.main import main
from slime_core.config.fields import field_groups
from slime_core.config.loading import load_config
from slime_core.doors.convert import convert
from slime_core.doors.script import read_script
from slime_core.errors import ConfigError
from tests.unit.check.model_folders import QUICKSTART, large_model

SCRIPT = Path(__file__).parents[3] / "examples" / "from-slime" / "run-qwen3-4B.sh"
ONE_GPU = (
    "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine",
    "1", "--tensor-model-parallel-size", "1", "--no-sequence-parallel", "--device", "cpu",
)  # fmt: skip


def test_every_flag_of_the_example_has_a_place_or_a_line():
    found = convert(SCRIPT, {"ROOT": "/r"})
    said = " ".join(found.report)
    fields = {name: value for group in found.tree.values() for name, value in group.items()}
    fields |= {f"sglang_{name}": value for name, value in found.tree["sglang"].items()}
    flags = [word for word in read_script(SCRIPT, {"ROOT": "/r"}).arguments if word[:2] == "--"]
    for flag in flags:
        assert flag.removeprefix("--").replace("-", "_") in fields or flag in said, flag
    assert len(flags) > 60


def test_the_example_keeps_its_values_with_their_types():
    tree = convert(SCRIPT, {"ROOT": "/r"}).tree
    assert tree["rollout"]["hf_checkpoint"] == "/r/Qwen3-4B"
    assert tree["eval"]["eval_prompt_data"] == ["aime", "/r/aime-2024.jsonl"]
    assert tree["train"] == {
        "save_interval": 20, "global_batch_size": 256, "lr": 1e-6, "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 9216,
    }  # fmt: skip
    assert tree["cluster"]["rollout_num_gpus"] == 8, "colocated: those of the trainer"
    assert tree["store"]["store_url"] == "/r/Qwen3-4B_slime/"
    assert tree["megatron"]["adam_beta2"] == 0.98 and tree["megatron"]["num_layers"] == 36
    assert tree["sglang"]["cuda_graph_bs"][:5] == [1, 2, 4, 8, 16]
    assert set(tree) < {*field_groups().values(), "megatron", "sglang"}


def test_what_has_no_meaning_here_is_reported():
    report = convert(SCRIPT, {}).report
    for sentence in (
        "models/qwen3-4B.sh is not there: the preset qwen3-4B stands for it",
        "left out: --ref-load /data/Qwen3-4B_torch_dist: it is not there to look at, so weights",
        "--load and --save are one folder: a run goes on there by itself",
        "left out: --balance-data is not there yet",
        "not read: pkill (line 3 of",
        "environment: export it where you start: PYTHONUNBUFFERED, MASTER_ADDR",
    ):
        assert any(sentence in line for line in report), sentence


def test_the_guide_shows_what_the_example_really_reports():
    guide = (SCRIPT.parents[2] / "docs" / "coming-from-slime.md").read_text(encoding="utf-8")
    block = guide.split("from-script examples/from-slime/run-qwen3-4B.sh --out run.yaml\n")[1]
    shown = block.split("```")[0].replace("examples/from-slime/", "").splitlines()[1:]
    report = convert(SCRIPT, {"ROOT": "/data"}).report
    said = [line.replace(f"{SCRIPT.parent}/", "") for line in report]
    assert [line.removesuffix(", ...") for line in shown] == [
        real[: len(line.removesuffix(", ..."))] if line.endswith(", ...") else real
        for line, real in zip(shown, said, strict=True)
    ]


def script(folder: Path, arguments: str, entry: str = "train.py") -> Path:
    path = folder / "run.sh"
    path.write_text(f"python {entry} {arguments}\n")
    return path


def test_unknown_flags_and_wrong_values_are_reported_and_left_to_the_check(tmp_path):
    found = convert(script(tmp_path, "--sede 3 --lr fast --num-layers x --seed 7"), {})
    assert found.tree["run"]["seed"] == 7 and "megatron" not in found.tree
    said = "\n".join(found.report)
    assert "left out: unknown flag --sede: did you mean --seed?" in said
    assert "left out: --num-layers must be a whole number, not 'x'" in said
    assert "to decide: train.lr must be a number of at least 0, not 'fast'" in said
    assert "to decide: run.num_rollout is missing" in said


def test_what_does_not_fit_together_is_told_with_what_was_left_out(tmp_path):
    path = script(tmp_path, "--tis-clip 2 --tis-threshold 3 --seed x --sede 1")
    with pytest.raises(ConfigError) as error:
        convert(path, {})
    [conflict, seed, unknown] = str(error.value).splitlines()
    assert "tis_threshold is another name of tis_clip" in conflict
    assert "--seed must be" in seed and "unknown flag --sede" in unknown


def test_a_size_that_is_no_number_is_left_to_the_check(tmp_path):
    found = convert(script(tmp_path, "--colocate --actor-num-nodes two"), {})
    assert "rollout_num_gpus" not in found.tree["cluster"]
    assert any("actor_num_nodes must be" in line for line in found.report)


def test_checkpoint_folders_mean_what_they_are(tmp_path):
    flags = "--hf-checkpoint m --load other --save s --ref-load m"
    found = convert(script(tmp_path, flags), {})
    assert found.tree["rollout"]["hf_checkpoint"] == "m" and "algorithm" not in found.tree
    assert "left out: --load other: training starts from hf_checkpoint" in found.report
    assert "--ref-load m: that is hf_checkpoint already" in found.report
    sft, base = (tmp_path / name for name in ("sft_torch_dist", "base_torch_dist"))
    for folder in (sft, base):
        folder.mkdir()
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
    flags = f"--hf-checkpoint m --load {sft} --ref-load {base} --use-kl-loss"
    there = convert(script(tmp_path, flags), {})
    assert there.tree["rollout"]["megatron_load"] == str(sft)
    assert there.tree["algorithm"]["ref_load"] == str(base)
    start = convert(script(tmp_path, "--load other"), {})
    assert start.tree["rollout"]["hf_checkpoint"] == "other"
    reference = convert(script(tmp_path, "--hf-checkpoint m --ref-load r --use-kl-loss"), {})
    assert reference.tree["algorithm"]["ref_load"] == "r"


def test_asynchronous_scripts_say_that_they_train_in_turn(tmp_path):
    found = convert(script(tmp_path, "--async-buffer-size 4", "train_async.py"), {})
    assert any("asynchronous training is not there yet" in line for line in found.report)
    assert any("--async-buffer-size is not there yet" in line for line in found.report)


def test_the_command_writes_the_file_once_and_its_plan_can_be_shown(tmp_path, monkeypatch, capsys):
    large_model(tmp_path / "Qwen3-4B")
    rows = [{"prompt": "1 + 1 = ?", "label": "2"}] * 40
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("math-17k.jsonl", "aime-2024.jsonl"):
        (tmp_path / name).write_text(text)
    shutil.copy(QUICKSTART.parent / "quickstart" / "model" / "chat_template.jinja",
                tmp_path / "Qwen3-4B")  # fmt: skip
    monkeypatch.setenv("ROOT", str(tmp_path))
    out = tmp_path / "run.yaml"
    assert main(["config", "from-script", str(SCRIPT), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "slime check" in shown.out and "--colocate" in shown.err
    assert main(["config", "from-script", str(SCRIPT), "--out", str(out)]) == 2
    assert "exists: remove it" in capsys.readouterr().err
    workspace = ("--workspace", str(tmp_path / "runs"))
    status = main(["check", str(out), *ONE_GPU, *workspace, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (status, report["problems"]) == (0, [])
    assert report["plan"]["optimizer_steps"] == 3000
    assert report["plan"]["parameters"] == pytest.approx(4.02e9, rel=0.01)


def test_show_diff_and_schema(tmp_path, capsys):
    one = tmp_path / "one.yaml"
    assert main(["config", "show", str(QUICKSTART), "--weight-decay", "0.5"]) == 0
    one.write_text(capsys.readouterr().out)
    assert load_config(one, {}).megatron["weight_decay"] == 0.5
    assert main(["config", "diff", str(QUICKSTART), str(one)]) == 1
    line = capsys.readouterr().out.split()
    assert line[:2] == ["megatron.weight_decay", "numeric"] and line[-1] == "0.5"
    assert main(["config", "diff", str(one), str(one)]) == 0
    capsys.readouterr()
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.validate(yaml.safe_load(QUICKSTART.read_text(encoding="utf-8")), schema)
    jsonschema.validate({"extends": "base.yaml", "train": {"lr": 1.0}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"train": {"lrr": 1.0}}, schema)
    assert main(["config", "shwo"]) == 2 and "did you mean show?" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.sh cannot be read: No such file"):
        convert(tmp_path / "none.sh", {})


def test_the_written_yaml_is_the_tree():
    found = convert(SCRIPT, {})
    assert yaml.safe_load(found.yaml) == found.tree
