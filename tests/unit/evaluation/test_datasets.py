import json
import math
from pathlib import Path

import pytest

from slime_core.errors import ConfigError
from slime_core.evaluation.datasets import resolve_eval_datasets
from slime_core.evaluation.resolve import eval_datasets
from tests.unit.config.trees import small

VECTORS = Path(__file__).parents[2] / "vectors" / "edge_cases.jsonl"
CASES = {row["fn"]: row for row in map(json.loads, VECTORS.open(encoding="utf-8"))}


def test_vector_of_the_precedence():
    case = CASES["eval_dataset_resolution"]
    given = case["input"]
    datasets = [{"path": "x.jsonl", **entry} for entry in given["datasets"]]
    found = resolve_eval_datasets(
        given["args"], {"defaults": given["defaults"], "datasets": datasets}
    )
    for dataset, expected in zip(found, case["expected"], strict=True):
        assert {name: getattr(dataset, name) for name in expected} == expected


def test_vector_of_the_typo():
    with pytest.raises(ConfigError, match="'temprature' in eval defaults; did you mean 'temper"):
        resolve_eval_datasets({}, CASES["eval_typo_key"]["input"])


def test_each_level_of_the_precedence_wins_over_those_below():
    entry = {"name": "a", "path": "p", "top_p": 0.1}
    defaults = {"top_p": 0.2}
    args = {"eval_top_p": 0.3, "rollout_top_p": 0.4}
    for expected in (0.1, 0.2, 0.3, 0.4, None):
        (found,) = resolve_eval_datasets(args, {"defaults": defaults, "datasets": [entry]})
        assert found.top_p == expected
        for level, key in ((entry, "top_p"), (defaults, "top_p"), (args, "eval_top_p")):
            if level.pop(key, None) is not None:
                break
        else:
            args.clear()


def test_zero_and_false_count_as_given():
    config = {"datasets": [{"name": "a", "path": "p", "temperature": 0, "no_stop_trim": False}]}
    (found,) = resolve_eval_datasets(
        {"eval_temperature": 0.7, "rollout_temperature": 1.0, "eval_no_stop_trim": True}, config
    )
    assert found.temperature == 0 and found.greedy and found.no_stop_trim is False


def test_keys_and_graders_fall_back_to_the_training_data():
    args = {"input_key": "q", "eval_label_key": "a", "label_key": "l", "rm_type": "math"}
    args |= {"apply_chat_template": True, "n_samples_per_eval_prompt": 4}
    (found,) = resolve_eval_datasets(args, None, ["aime", "aime.jsonl@[:30]"])
    assert (found.name, found.path) == ("aime", "aime.jsonl@[:30]")
    assert (found.input_key, found.label_key, found.rm_type) == ("q", "a", "math")
    assert (found.apply_chat_template, found.n_samples_per_eval_prompt) == (True, 4)


@pytest.mark.parametrize(
    ("entry", "defaults", "expected"),
    [
        ({}, {}, (None, "flag.py")),
        ({"rm_type": "math"}, {}, ("math", None)),
        ({"rm_type": "math"}, {"custom_rm_path": "default.py"}, ("math", None)),
        ({"custom_rm_path": "own.py"}, {"rm_type": "math"}, (None, "own.py")),
        ({}, {"rm_type": "math"}, ("math", None)),
    ],
)
def test_a_datasets_grader_wins_over_a_function_named_below(entry, defaults, expected):
    config = {"defaults": defaults, "datasets": [{"name": "a", "path": "p", **entry}]}
    (found,) = resolve_eval_datasets({"custom_rm_path": "flag.py"}, config)
    assert (found.rm_type, found.custom_rm_path) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a", "1", "b", "2"], [("a", "1"), ("b", "2")]),
        ([["a", "1"], ["b", "2"]], [("a", "1"), ("b", "2")]),
        (["dir/gsm8k.test.jsonl@[0:5]"], [("gsm8k", "dir/gsm8k.test.jsonl@[0:5]")]),
        ([], []),
    ],
)
def test_prompt_data_flag_in_one_or_repeated(given, expected):
    assert [(d.name, d.path) for d in resolve_eval_datasets({}, None, given)] == expected


def test_mapping_form_and_the_eval_key():
    config = {"eval": {"datasets": {"a": {"path": "1"}, "b": {"path": "2", "top_k": 5}}}}
    found = resolve_eval_datasets({}, config)
    assert [(d.name, d.path, d.top_k) for d in found] == [("a", "1", None), ("b", "2", 5)]


@pytest.mark.parametrize(
    ("config", "data", "message"),
    [
        ({"datasets": [{"name": "a", "path": "p", "topp": 1}]}, [], "'topp' in eval dataset"),
        ({"dataset": []}, [], "did you mean 'datasets'"),
        ({"eval": {}, "x": 1}, [], "'x' in the evaluation file"),
        ({"datasets": [{"path": "p"}]}, [], "eval dataset 1 needs a `name`"),
        ({"datasets": [{"name": "a"}]}, [], "'a' needs a `path`"),
        ({"datasets": [{"name": "a", "path": "p"}]}, ["a", "q"], "two evaluation datasets"),
        ({"defaults": {"name": "a"}}, [], "cannot hold `name`"),
        ({"datasets": "a.jsonl"}, [], "a list of entries"),
        ({"datasets": ["a.jsonl"]}, [], "1 must hold keys and values.*not 'a.jsonl'"),
        ({"datasets": {"a": "a.jsonl"}}, [], "'a' must hold keys and values.*not 'a.jsonl'"),
        ({"eval": 3}, [], "`eval` of the evaluation file must hold keys and values.*not 3"),
        ({}, ["a", "p", "b"], "'b' stands alone"),
        ({"defaults": {"n_samples_per_eval_prompt": 0}}, ["a", "p"], "whole number from 1"),
        ({"defaults": {"max_response_len": 1.5}}, ["a", "p"], "whole number from 1"),
        ({"defaults": {"temperature": -1}}, ["a", "p"], "temperature must be.*at least 0, not -1"),
        ({"defaults": {"temperature": math.nan}}, ["a", "p"], "temperature must be.*not nan"),
        ({"defaults": {"top_p": 1.5}}, ["a", "p"], "top_p must be a number above 0, at most 1"),
        ({"defaults": {"top_k": 0}}, ["a", "p"], "top_k must be -1"),
        ({"defaults": {"stop": ["x", ""]}}, ["a", "p"], "stop must be.*none of them empty"),
        ({"defaults": {"stop_token_ids": ["a"]}}, ["a", "p"], "stop_token_ids must be a list"),
        ({"defaults": {"apply_chat_template": "false"}}, ["a", "p"], "true or false, not 'false'"),
        ({"defaults": {"metadata_overrides": [1]}}, ["a", "p"], "must be keys and values"),
        ({"defaults": {"top_p": 2, "stop": 3}}, ["a", "p"], "(?s)'a': top_p .*\n.*'a': stop "),
    ],
)
def test_what_cannot_be_is_one_sentence(config, data, message):
    with pytest.raises(ConfigError, match=message):
        resolve_eval_datasets({}, config, data)


@pytest.mark.parametrize("content, sentence", [
    (b"datasets: []\ndatasets: []\n", "line 2: datasets stands twice here"),
    (b"\xff\xfe\x00", "is not a text file"),
])  # fmt: skip
def test_a_file_that_says_a_thing_twice_or_is_no_text_is_refused(content, sentence, tmp_path):
    path = tmp_path / "eval.yaml"
    path.write_bytes(content)
    config = small(eval_interval=1, eval_config=str(path))
    with pytest.raises(ConfigError, match=sentence):
        eval_datasets(config)
