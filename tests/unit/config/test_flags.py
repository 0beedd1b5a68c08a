"""Flags follow the tree: every field has one, nothing is guessed, nothing is swallowed."""

import pytest

from slime_core.config.fields import field_groups
from slime_core.config.flags import FlagParser, add_flags, flag_of, overrides_of
from slime_core.config.loading import load_config
from slime_core.doors.command_line import parse
from slime_core.errors import ConfigError

NEEDED = {
    "run": {"num_rollout": 2},
    "data": {"prompt_data": "p.jsonl", "label_key": "label"},
    "rollout": {"hf_checkpoint": "m", "rollout_batch_size": 4, "rollout_max_response_len": 8},
    "rewards": {"rm_type": "exact_match"},
}


def parser() -> FlagParser:
    made = FlagParser(prog="slime train")
    add_flags(made)
    return made


def overrides(*arguments: str):
    return overrides_of(parse(parser(), arguments))


def test_every_field_of_the_tree_has_its_flag():
    options = {option for action in parser()._actions for option in action.option_strings}
    assert {flag_of(name) for name in field_groups()} <= options


def test_values_reach_the_tree_with_their_types():
    given = overrides(
        "--seed", "7", "--lr", "1e-4", "--rollout-top-k", "-1", "--no-store-fsync",
        "--rollout-stop-token-ids", "3", "4", "--eval-interval", "5",
        "--eval-prompt-data", "a", "b", "--eval-prompt-data", "c", "d",
        "--apply-chat-template-kwargs", '{"tools": null}',
    )  # fmt: skip
    config = load_config(NEEDED, given)
    assert (config.run.seed, config.train.lr, config.rollout.rollout_top_k) == (7, 1e-4, -1)
    assert config.store.store_fsync is False
    assert config.rollout.rollout_stop_token_ids == [3, 4]
    assert config.eval.eval_prompt_data == ["a", "b", "c", "d"]
    assert config.data.apply_chat_template_kwargs == {"tools": None}


def test_flags_that_are_not_given_override_nothing():
    assert overrides() == {}


def test_none_unsets_an_optional_field():
    tree = {**NEEDED, "train": {"global_batch_size": 4}}
    assert (
        load_config(tree, overrides("--global-batch-size", "none")).train.global_batch_size is None
    )


def test_engine_options_are_collected_under_their_own_names():
    given = overrides(
        "--sglang-mem-fraction-static", "0.8", "--sglang-disable-radix-cache",
        "--sglang-attention-backend=triton", "--sglang", '{"tp_size": 1}',
        "--sglang-server-concurrency", "9",
    )  # fmt: skip
    assert given["sglang"] == {
        "tp_size": 1,
        "mem_fraction_static": 0.8,
        "disable_radix_cache": True,
        "attention_backend": "triton",
    }
    assert given["sglang_server_concurrency"] == "9"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rollout-bach-size", "4"], r"--rollout-bach-size: did you mean --rollout-batch-size\?"),
        (["--rollout-batch", "4"], r"--rollout-batch: did you mean --rollout-batch-size\?"),
        (["--zzz"], "unknown flag --zzz: `slime train --help` lists all flags"),
        (["stray"], "unexpected argument stray"),
        (["\u2014num-rollout"], "it begins with a long dash; write --num-rollout"),
        (["--seed"], "--seed needs a value"),
        (["--megatron", "{1"], "--megatron is not valid JSON"),
        (["--megatron", "[1]"], "must be a JSON object"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_a_sentence(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        overrides(*arguments)


def test_a_wrong_type_names_the_field_and_the_value():
    with pytest.raises(ConfigError, match=r"--seed must be a whole number of .*, not 'abc'"):
        load_config(NEEDED, overrides("--seed", "abc"))
