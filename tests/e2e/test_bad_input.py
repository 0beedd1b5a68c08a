"""What a person can get wrong gives one sentence with the fix, and a status that is not zero."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SLIME = [sys.executable, "-m", "flows.cli.main"]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def slime(*arguments, **environment) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SLIME, *map(str, arguments)],
        capture_output=True, text=True, timeout=300, env={**os.environ, **environment},
    )  # fmt: skip


def complaint(*arguments, status: int, **environment) -> str:
    """The one line on stderr of a command that must fail."""
    done = slime(*arguments, **environment)
    assert done.returncode == status, done.stderr
    said = done.stdout + done.stderr
    assert "Traceback" not in said and "actor" not in said.lower(), said
    assert done.stderr.startswith("slime: ")
    return done.stderr.strip()


def train(tmp_path: Path, *arguments, status: int = 2, **environment) -> str:
    workspace = ("--workspace", tmp_path / "runs")
    return complaint("train", QUICKSTART, *workspace, *arguments, status=status, **environment)


def config_with(tmp_path: Path, group: str, **fields) -> Path:
    tree = yaml.safe_load(QUICKSTART.read_text())
    tree[group] = {**tree.get(group, {}), **fields}
    text = yaml.safe_dump(tree).replace("./quickstart", str(QUICKSTART.parent / "quickstart"))
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_help_and_version_are_quick():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert slime("--version").stdout.startswith("slime-flow 0.")
    assert "train" in slime("--help").stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds / 2 < 0.3


def test_the_help_of_train_explains_every_flag():
    text = slime("train", "--help").stdout
    assert "--rollout-batch-size INT" in text and "Prompts of one iteration." in text
    assert "--new" in text and "--take-over" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian"], "unknown command trian: did you mean train?"),
        (["train", "nowhere.yaml"], "nowhere.yaml: no such configuration file"),
        (["train", QUICKSTART, "--rollout-bach-size", "3"], "did you mean --rollout-batch-size?"),
        (["train", QUICKSTART, "--seed", "many"], "--seed must be a whole number of at least 0"),
        (["train", QUICKSTART, "--new", "--run-id", "x"], "not allowed with argument --new"),
        (["train", QUICKSTART, "--run-id", "a/b"], "run id 'a/b': use letters, digits"),
        (["train", QUICKSTART, "--global-batch-size", "7"], "cannot be divided by"),
        (["train"], "prompt_data is missing"),
        (["doctor", "--worksapce", "x"], "unknown flag --worksapce: did you mean --workspace?"),
    ],
)
def test_a_wrong_line_is_explained(arguments, sentence):
    assert sentence in complaint(*arguments, status=2)


def test_an_unknown_key_of_the_file_is_named_with_the_nearest(tmp_path):
    path = config_with(tmp_path, "train", lrr=1e-3)
    assert "lrr" in (text := complaint("train", path, status=2)) and "did you mean lr?" in text


def test_a_file_that_is_no_yaml_is_named(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run: {a: [")
    assert "run.yaml, line 1, column 11 is not valid YAML" in complaint("train", path, status=2)


def test_debug_shows_the_traceback():
    done = slime("train", "nowhere.yaml", "--debug")
    assert done.returncode != 0 and "Traceback" in done.stderr


def test_a_workspace_that_cannot_be_written_is_named():
    text = complaint("train", QUICKSTART, "--workspace", "/proc/none", status=2)
    assert "/proc/none" in text


def test_a_workspace_that_is_a_file_is_named(tmp_path):
    (tmp_path / "runs").write_text("")
    assert str(tmp_path / "runs") in train(tmp_path, status=2)


def test_a_missing_model_folder_is_named(tmp_path):
    text = train(tmp_path, "--hf-checkpoint", tmp_path / "no-model")
    assert "no-model" in text


def test_a_prefect_that_does_not_answer_is_named_with_the_way_out(tmp_path):
    text = train(tmp_path, status=1, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert "http://127.0.0.1:9/api (from PREFECT_API_URL) does not answer" in text
    assert "--no-prefect" in text


def test_the_users_prefect_profile_counts_and_is_left_alone(tmp_path):
    home = tmp_path / "prefect"
    home.mkdir()
    profile = 'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n'
    (home / "profiles.toml").write_text(profile)
    text = train(tmp_path, status=1, PREFECT_HOME=str(home))
    assert f"(from profile mine in {home / 'profiles.toml'}) does not answer" in text
    assert [item.name for item in home.iterdir()] == ["profiles.toml"]


def test_what_is_wrong_with_the_data_is_found_before_anything_is_made(tmp_path):
    """tests/unit/check holds the sentences; here a whole command is looked at from outside."""
    rows = [json.dumps({"input": "5281=", "label": "1258"}), "not json"]
    (tmp_path / "bad.jsonl").write_text("\n".join(rows))
    text = train(tmp_path, "--prompt-data", tmp_path / "bad.jsonl")
    assert "bad.jsonl, line 2: not JSON" in text
    assert not (tmp_path / "runs").exists()
