"""YAML, `extends` and overrides become one tree, or one sentence that says what to change."""

from pathlib import Path

import pytest
import yaml

from slime_core.config.loading import load_config
from slime_core.errors import ConfigError
from slime_core.plugins.args_view import ArgsView
from tests.unit.config.trees import SMALL, small


def write(path: Path, tree: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def refusal(source: object, **overrides: object) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(source, overrides)  # type: ignore[arg-type]
    return str(error.value)


def test_a_file_and_its_tree_are_the_same_configuration(tmp_path):
    path = write(tmp_path / "run.yaml", SMALL)
    assert load_config(path, {}) == load_config(str(path), {}) == load_config(SMALL, {})


def test_overrides_win_and_open_groups_are_merged():
    tree = {**SMALL, "megatron": {"weight_decay": 0.5, "adam_beta2": 0.9}, "train": {"lr": 1.0}}
    config = load_config(tree, {"lr": 2.0, "megatron": {"weight_decay": 0.1}})
    assert config.train.lr == 2.0
    assert config.megatron == {"weight_decay": 0.1, "adam_beta2": 0.9}
    assert tree["train"] == {"lr": 1.0}, "the caller's tree stays as it was"


def test_extends_puts_a_file_over_its_base(tmp_path):
    write(tmp_path / "base" / "base.yaml", {**SMALL, "train": {"lr": 1.0, "clip_grad": 3.0}})
    child = {"extends": "../base/base.yaml", "train": {"lr": 2.0}}
    path = write(tmp_path / "runs" / "child.yaml", child)
    config = load_config(path, {})
    assert (config.train.lr, config.train.clip_grad) == (2.0, 3.0)


def test_extends_works_in_a_tree_from_a_form_too(tmp_path):
    base = write(tmp_path / "base.yaml", SMALL)
    config = load_config({"extends": str(base), "run": {"num_rollout": 9}}, {})
    assert config.run.num_rollout == 9 and config.rewards.rm_type == "exact_match"


def test_relative_paths_of_a_file_belong_to_its_folder(tmp_path, monkeypatch):
    tree = {**SMALL, "data": {**SMALL["data"], "prompt_data": "./d/p.jsonl"}}
    tree["eval"] = {
        "eval_interval": 1,
        "eval_config": {"datasets": [{"name": "a", "path": "../held.jsonl"}]},
    }
    path = write(tmp_path / "c" / "run.yaml", tree)
    monkeypatch.chdir("/")
    config = load_config(path, {})
    assert config.data.prompt_data == str(tmp_path / "c" / "d" / "p.jsonl")
    datasets = config.eval.eval_config["datasets"]  # type: ignore[index]
    assert datasets[0]["path"] == str(tmp_path / "held.jsonl")


def test_extends_in_a_circle_is_named_however_the_paths_are_spelled(tmp_path):
    write(tmp_path / "a.yaml", {"extends": "../" + tmp_path.name + "/b.yaml"})
    write(tmp_path / "b.yaml", {"extends": "./a.yaml"})
    message = refusal(tmp_path / "a.yaml")
    assert "circle" in message and "b.yaml" in message


@pytest.mark.parametrize("base", [3, ["a.yaml", "b.yaml"]])
def test_extends_takes_one_path(base):
    assert "takes the path of one YAML file" in refusal({**SMALL, "extends": base})


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"rolout": {}}, "unknown key rolout: did you mean rollout?"),
        ({"data": {"promt_data": "x"}}, "promt_data: did you mean prompt_data?"),
        ({"data": {"lr": 1.0}}, "lr stands under `data:` but belongs under `train:`"),
        ({"rollout_batch_size": 4}, "rollout_batch_size belongs under `rollout:`"),
        ({"train": None}, "`train:` must hold keys and values"),
        ({"train": "lr"}, "`train:` must hold keys and values"),
    ],
)
def test_wrong_keys_are_one_sentence_with_the_right_one(tmp_path, tree, sentence):
    assert sentence in refusal({**SMALL, **tree})
    assert sentence in refusal(write(tmp_path / "run.yaml", {**SMALL, **tree}))


def test_an_unknown_override_is_refused_with_the_nearest_name():
    assert refusal(SMALL, rollout_batchsize=3) == (
        "unknown option rollout_batchsize: did you mean rollout_batch_size?"
    )
    assert refusal(SMALL, qqqq=3) == "unknown option qqqq"


def test_settings_of_custom_functions_may_stand_in_a_file(tmp_path):
    path = write(tmp_path / "own.yaml", {"depth": 3, "urls": ["a"]})
    config = load_config(SMALL, {"custom_config_path": str(path)})
    args = ArgsView(config)
    assert (args.depth, args.urls) == (3, ["a"])
    tree = {**SMALL, "rollout": {**SMALL["rollout"], "custom_config": "./own.yaml"}}
    assert load_config(write(tmp_path / "run.yaml", tree), {}).rollout == config.rollout
    assert "none.yaml: no such file for" in refusal(SMALL, custom_config_path="none.yaml")
    clash = write(tmp_path / "clash.yaml", {"lr": 3})
    assert "custom_config holds lr" in refusal(SMALL, custom_config=str(clash))
    assert "must hold keys and values" in refusal(SMALL, custom_config=str(write(path, [1])))


def test_every_wrong_key_is_told_at_once():
    tree = {**SMALL, "rolout": {}, "train": {"lrr": 1, "seed": 2}, "use_wandb": True}
    lines = refusal(tree).splitlines()
    assert len(lines) == 4 and all(line.startswith("configuration: ") for line in lines)
    assert len(refusal(SMALL, lrr=1, sede=2, use_wandb=True).splitlines()) == 3


def test_wrong_values_are_told_with_wrong_keys(tmp_path):
    """And nothing that may follow from the wrong key, such as what it leaves missing."""
    tree = {**SMALL, "train": {"lrr": 1, "lr": "fast"}, "rollout": {"rollout_batch_sise": 4}}
    path = write(tmp_path / "run.yaml", tree)
    assert refusal(path).splitlines() == [
        f"{path}: unknown key in `rollout:` rollout_batch_sise: did you mean rollout_batch_size?",
        f"{path}: unknown key in `train:` lrr: did you mean lr?",
        f"{path}: train.lr must be a number of at least 0, not 'fast'",
    ]


def test_overrides_over_a_group_that_is_no_group_are_refused_not_crashed():
    assert "`run:` must hold keys and values" in refusal({**SMALL, "run": None}, seed=1)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ({"lr": "fast"}, "--lr must be a number of at least 0, not 'fast'"),
        (
            {"num_rollout": -1},
            "--num-rollout must be a whole number of at least 0 and of at most 999999, not -1",
        ),
        (
            {"rollout_batch_size": 2.5},
            "--rollout-batch-size must be a whole number of at least 1, not 2.5",
        ),
        ({"rollout_temperature": 0}, "--rollout-temperature must be a number above 0, not 0"),
        ({"eps_clip_c": 0.5}, "--eps-clip-c must be a number above 1, or none, not 0.5"),
        ({"gamma": 2}, "--gamma must be a number of at least 0 and of at most 1, not 2"),
        ({"rollout_shuffle": "often"}, "--rollout-shuffle must be true or false, not 'often'"),
        ({"update_weight_transport": "fax"}, "--update-weight-transport must be one of disk, t"),
        ({"megatron": 3}, "--megatron must be keys and values, not 3"),
        ({"eval_config": [1]}, "--eval-config must be keys and values or text, or none, not [1]"),
        ({"rollout_stop": [1]}, "--rollout-stop must be a list of texts, not 1"),
    ],
)
def test_a_wrong_type_is_one_sentence_with_what_is_expected(override, sentence):
    message = refusal(SMALL, **override)
    assert message.startswith(sentence), message
    assert "\n" not in message


def test_a_wrong_type_in_a_file_is_named_with_the_file(tmp_path):
    path = write(tmp_path / "run.yaml", {**SMALL, "train": {"lr": "fast"}})
    assert refusal(path) == f"{path}: train.lr must be a number of at least 0, not 'fast'"
    assert refusal({**SMALL, "train": {"lr": "fast"}}).startswith("train.lr must be")
    assert refusal(path, lr="slow").startswith("--lr must be")


def test_every_broken_rule_is_told():
    lines = refusal(SMALL, global_batch_size=7, max_tokens_per_gpu=9, eval_interval=2)
    assert len(lines.splitlines()) == 3
    lines = refusal(
        SMALL, eps_clip=2.0, tis_clip=3.0, opsm_delta=0.1, rm_type=None, group_rm=True
    ).splitlines()
    begins = ("eps_clip 2.0 would", "tis_clip 3.0 has", "opsm_delta 0.1 has", "no reward is",
              "group_rm hands")  # fmt: skip
    assert [line.startswith(begin) for line, begin in zip(lines, begins, strict=True)] == [True] * 5


def test_every_missing_field_is_named_with_its_flag():
    lines = refusal({}).splitlines()
    assert "run.num_rollout is missing: set it in the YAML file or as --num-rollout" in lines
    assert any(line.startswith("data.prompt_data is missing") for line in lines)
    assert len(lines) == 5


def test_files_that_cannot_be_read_are_named(tmp_path):
    assert refusal(tmp_path / "no.yaml").endswith("no.yaml: no such configuration file")
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "broken.yaml").write_text("run: [", encoding="utf-8")
    assert "broken.yaml, line 1, column 7 is not valid YAML" in refusal(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- 1", encoding="utf-8")
    assert "must hold groups" in refusal(tmp_path / "list.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "binary.yaml" in refusal(tmp_path / "binary.yaml")


def test_the_tree_survives_a_round_trip_through_plain_values():
    config = small(eval_prompt_data=["a", "a.jsonl"], eval_interval=2)
    assert load_config(config.model_dump(), {}) == config


def test_the_shipped_configuration_loads():
    config = load_config(Path("configs/quickstart.yaml"), {})
    assert Path(config.rollout.hf_checkpoint).is_absolute()
    assert Path(config.data.prompt_data).is_file()


@pytest.mark.parametrize("text, sentence", [
    ("train: {lr: 1.0}\ntrain: {lr: 2.0}\n", ", line 2: train stands twice here: keep one"),
    ("train:\n  lr: 1.0\n  lr: 2.0\n", ", line 3: lr stands twice here: keep one of them"),
    ("train: &t\n  lr: *t\n", ", line 2: *t stands inside &t: write its value out"),
    ("megatron: {a: &l [1, *l]}\n", ", line 1: *l stands inside &l"),
    ("run: {}\n---\ndata: {}\n", ", line 2: a second document begins with `---`: keep one"),
    ("train: {lr: !!python/object/apply:os.getpid []}\n", ", line 1: only plain values are read"),
])  # fmt: skip
def test_what_yaml_would_drop_or_never_end_is_refused_with_its_line(text, sentence, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    assert f"{path}{sentence}" in refusal(path)


def test_anchors_and_merged_keys_may_be_used(tmp_path):
    path = tmp_path / "run.yaml"
    text = yaml.safe_dump(SMALL) + "megatron: &m {weight_decay: 0.5, adam_beta2: 0.9}\n"
    path.write_text(text + "sglang: {<<: *m, weight_decay: 0.1}\n", encoding="utf-8")
    assert load_config(path, {}).sglang == {"weight_decay": 0.1, "adam_beta2": 0.9}


@pytest.mark.parametrize("value", [True, float("inf"), float("nan"), "inf"])
def test_a_number_is_no_switch_and_has_an_end(value):
    assert "--lr must be a number of at least 0, not " in refusal(SMALL, lr=value)
    assert "--num-rollout must be a whole number" in refusal(SMALL, num_rollout=value)


def test_a_number_beyond_what_json_holds_is_refused():
    assert "at least 1 (and within 9007199254740991)" in refusal(SMALL, rollout_batch_size=2**53)
    assert "and of at most 999999, not" in refusal(SMALL, num_rollout=1e26)


def test_a_zero_byte_is_in_no_text(tmp_path):
    assert refusal(SMALL, run_name="a\0.jsonl") == "--run-name must be text, not 'a\\x00.jsonl'"
    assert "`extends` takes the path" in refusal({**SMALL, "extends": "a\0.yaml"})
