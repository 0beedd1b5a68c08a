"""Other names of fields, on the command line, in YAML and in a form."""

import pytest

from slime_core.config.flags import FlagParser, add_flags, overrides_of
from slime_core.config.loading import load_config
from slime_core.doors.command_line import parse
from slime_core.errors import ConfigError
from tests.unit.config.trees import SMALL


def config(*arguments: str, **tree):
    parser = FlagParser(prog="slime train")
    add_flags(parser)
    return load_config({**SMALL, **tree}, overrides_of(parse(parser, arguments)))


def refusal(*arguments: str, **tree) -> str:
    with pytest.raises(ConfigError) as error:
        config(*arguments, **tree)
    return str(error.value)


def test_both_names_of_a_thing_work():
    assert config("--use-tis", "--tis-threshold", "0.9").algorithm.tis_clip == 0.9
    assert config("--save", "out").store.store_url == "out"
    assert config("--load", "m2").rollout.hf_checkpoint == "m2"
    assert config("--initial-megatron-checkpoint", "m3").rollout.hf_checkpoint == "m3"
    tree = config(algorithm={"use_tis": True, "tis_threshold": 0.8})
    assert tree.algorithm.tis_clip == 0.8
    assert load_config(SMALL, {"use_tis": True, "tis_threshold": 0.7}).algorithm.tis_clip == 0.7


def test_what_happens_anyway_may_be_said():
    said = config("--no-offload-rollout", "--no-check-for-nan-in-loss-and-grad")
    assert said.megatron == {"no_check_for_nan_in_loss_and_grad": True}
    assert said.model_copy(update={"megatron": {}}) == config()
    assert config("--no-offload-train") == config(), "a switch like any other"
    assert "--offload-rollout is not there yet" in refusal("--offload-rollout")


@pytest.mark.parametrize(
    "flag",
    ["--deterministic-mode", "--offload-optimizer-states"],
)
def test_options_of_megatron_that_would_change_nothing_are_not_taken(flag):
    assert f"{flag} is not there yet, it waits for: " in refusal(flag)
    name = flag.removeprefix("--").replace("-", "_")
    assert f"{name} is not there yet" in refusal(megatron={name: True})


def test_two_names_with_two_values_are_refused():
    sentence = refusal("--use-tis", "--tis-threshold", "0.9", "--tis-clip", "2")
    assert "tis_threshold is another name of tis_clip, and they differ: '0.9' and '2'" in sentence
    assert "differ" in refusal("--hf-checkpoint", "a", "--load", "b")
    both = refusal("--tis-threshold", "1", "--tis-clip", "2", "--lrr", "1", "--seed", "x",
                   "--hf-checkpoint", "a", "--load", "b")  # fmt: skip
    assert len(both.splitlines()) == 4, "every problem at once"
    assert config("--hf-checkpoint", "a", "--load", "a/").rollout.hf_checkpoint == "a/"


def test_loading_what_is_saved_is_what_every_run_does():
    found = config("--load", "out/", "--save", "out")
    assert found.store.store_url == "out"
    assert found.rollout.hf_checkpoint == SMALL["rollout"]["hf_checkpoint"]


def test_a_megatron_checkpoint_as_a_start_has_a_field_of_its_own(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    for name in ("--load", "--initial-megatron-checkpoint"):
        found = config(name, str(tmp_path), "--hf-checkpoint", "model").rollout
        assert (found.megatron_load, found.hf_checkpoint) == (str(tmp_path), "model")
    other = refusal("--load", str(tmp_path), "--megatron-load", "elsewhere")
    assert "load is another name of megatron_load, and they differ" in other


def test_names_that_are_not_there_yet_say_so_wherever_they_stand():
    reason = "use_wandb is not there yet, it waits for: a W&B sink"
    assert reason in refusal(tracking={"use_wandb": True})
    assert reason in refusal(use_wandb=True)
    given = refusal(megatron={"data_path": "x", "mock-data": True})
    assert given.count("is refused: loads pre-training data") == 2
    with pytest.raises(ConfigError, match=reason):
        load_config(SMALL, {"use_wandb": True})


def test_evaluation_data_may_be_listed_or_repeated():
    once = config("--eval-interval", "1", "--eval-prompt-data", "a", "a.jsonl", "b", "b.jsonl")
    again = config(
        "--eval-interval", "1", "--eval-prompt-data", "a", "a.jsonl",
        "--eval-prompt-data", "b", "b.jsonl",
    )  # fmt: skip
    assert once == again


def test_sglangs_tensor_parallel_size_is_the_gpus_of_an_engine():
    assert config("--sglang-tp-size", "1").cluster.rollout_num_gpus_per_engine == 1
    both = refusal("--sglang-tp-size", "2", "--rollout-num-gpus-per-engine", "1")
    assert "--sglang-tp-size 2 x --sglang-pp-size 1 needs 2 GPUs" in both
    assert "rollout_num_gpus_per_engine is 1" in both
    alone = refusal("--sglang-tp-size", "2", "--sglang-pp-size", "2")
    assert "needs" not in alone and "several GPUs" in alone, "it sets the GPUs of an engine: 4"
