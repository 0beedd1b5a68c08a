"""slime's command lines: every flag reaches its place, or is answered by what it is."""

import pytest

import train_async
from slime_core.config.flags import FlagParser, add_flags, overrides_of
from slime_core.doors.command_line import parse
from slime_core.errors import ConfigError
from slime_core.megatron.arguments import check_names

MODEL_ARGS = """
    --swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings
    --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000
    --vocab-size 151936 --kv-channels 128 --qk-layernorm
"""
OTHERS = """
    --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full
    --recompute-num-layers 1 --recompute-modules core_attn mlp --lr-decay-style constant
    --weight-decay 0.1 --adam-beta2 0.98 --attention-dropout 0.0 --attention-backend flash
    --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --bf16 --no-rope-fusion
"""


def overrides(*arguments: str) -> dict:
    parser = FlagParser(prog="slime train")
    parser.add_argument("config", nargs="?")
    add_flags(parser)
    parsed = parse(parser, arguments)
    assert parsed.config in (None, "run.yaml")
    return overrides_of(parsed)


def refused(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        overrides(*arguments)
    return str(error.value).splitlines()


def test_megatrons_classic_names_reach_the_trainer():
    given = overrides(*MODEL_ARGS.split(), "--lr", "1e-6", *OTHERS.split())
    assert given["lr"] == "1e-6"
    options = given["megatron"]
    check_names(options)
    expected = {
        "swiglu": True, "num_layers": 36, "hidden_size": 2560, "norm_epsilon": 1e-6,
        "rotary_base": 1e6, "qk_layernorm": True, "normalization": "RMSNorm",
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "adam_beta2": 0.98,
        "recompute_granularity": "full", "recompute_num_layers": 1, "attention_backend": "flash",
        "recompute_modules": ["core_attn", "mlp"], "bf16": True, "no_rope_fusion": True,
        "attention_dropout": 0.0, "weight_decay": 0.1,
    }  # fmt: skip
    assert expected.items() <= options.items()
    assert len(options) == (MODEL_ARGS + OTHERS).count(" --")


def test_values_of_other_flags_are_never_taken_for_the_configurations_path():
    assert overrides("run.yaml", "--num-layers", "36")["megatron"] == {"num_layers": 36}
    assert overrides("--sglang-mem-fraction-static", "0.8")["sglang"] == {
        "mem_fraction_static": 0.8
    }


def test_a_switch_can_be_switched_off():
    assert overrides("--no-sequence-parallel")["megatron"] == {"sequence_parallel": False}


def test_lists_of_sglang_take_all_that_follows():
    given = overrides("--sglang-cuda-graph-bs", "1", "2", "4", "--sglang-disable-radix-cache")
    assert given["sglang"] == {"cuda_graph_bs": [1, 2, 4], "disable_radix_cache": True}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--use-wandb", "--use-wandb is not there yet, it waits for: a W&B sink"),
        ("--train-backend fsdp", "--train-backend is refused: Megatron-core is the"),
        ("--data-path x", "--data-path is refused: loads pre-training data; prompts come from"),
        ("--router-policy x", "--router-policy is not there yet, it waits for: SGLang's router"),
        ("--offload-rollout", "--offload-rollout is not there yet, it waits for: engines giving"),
        ("--train-iters 5", "--train-iters is set by run.num_rollout"),
        ("--use-cpu-initialization", "--use-cpu-initialization is set by the trainer itself"),
        ("--router-cache-threshold 1", "--router-cache-threshold is not there yet, it waits for"),
        ("--num-layer 3", "unknown flag --num-layer: did you mean --num-layers?"),
        ("--num-layers many", "--num-layers must be a whole number, not 'many'"),
        ("--num-layers", "--num-layers needs a value"),
        ("--num-layers 3 4", "unexpected argument 4: --num-layers takes one value"),
        ("--weight-decay much", "--weight-decay must be a number, not 'much'"),
        ("--swiglu true", "--swiglu is a switch, so it takes no value such as true"),
    ],
)
def test_each_flag_that_cannot_be_taken_is_answered_by_what_it_is(arguments, sentence):
    (line,) = refused(*arguments.split())
    assert line.startswith(sentence)


def test_choices_are_taken_by_name_and_told():
    options = overrides("--cuda-graph-impl", "none", "--lr-decay-style", "cosine")["megatron"]
    assert options == {"cuda_graph_impl": "none", "lr_decay_style": "cosine"}
    check_names(options)
    with pytest.raises(ConfigError, match="must be one of constant, linear, cosine, inverse-squ"):
        check_names({"lr_decay_style": "cos"})
    with pytest.raises(ConfigError, match="'exp_avg_dtype' must be one of float32, float16, bf"):
        check_names({"exp_avg_dtype": "fp32"})


def test_an_option_of_one_value_or_several_takes_both():
    words = ["--moe-layer-freq", "[1, 1]", "--moe-aux-loss-coeff", "0",
             "--moe-router-load-balancing-type", "none", "--recompute-modules", "mlp"]  # fmt: skip
    parser = FlagParser(prog="slime train")
    add_flags(parser)
    assert overrides_of(parse(parser, words))["megatron"] == {
        "moe_layer_freq": [1, 1],
        "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none",
        "recompute_modules": ["mlp"],
    }


def test_what_happens_anyway_may_be_said():
    line = "--train-backend megatron --update-weight-mode full --update-weights-interval 1"
    assert overrides(*line.split(), "--use-fault-tolerance", "--log-passrate", "--seed", "3") == {
        "seed": "3"
    }
    assert "asynchronous training" in refused("--update-weights-interval", "2")[0]


def test_all_of_them_are_answered_at_once():
    lines = refused("--use-wandb", "--zzzz", "1", "--http-proxy", "x", "--num-layers", "3")
    assert len(lines) == 3
    assert "--zzzz" in lines[1] or "--zzzz" in lines[0]


def test_train_async_says_that_it_is_not_there_yet(capsys):
    assert train_async.main() == 2
    assert "python train.py" in capsys.readouterr().err


def test_every_wrong_flag_and_value_of_a_line_is_told_at_once():
    line = "run.yaml --seed --lrr 1 --lr abc --num-rollout x --num-layers z --http-proxy p"
    said = refused(*line.split(), "--use-kl-loss=true", "--megatron", "[1]")
    assert [next(i for i, text in enumerate(said) if part in text) for part in (
        "--seed needs a value", "--use-kl-loss is a switch, so it takes no value",
        "--megatron must be a JSON object", "unknown flag --lrr: did you mean --lr?",
        "--num-layers must be a whole number", "--http-proxy is refused",
        "--num-rollout must be a whole number of at least 0 and of at most 999999, not 'x'",
        "--lr must be a number of at least 0, not 'abc'",
    )] and len(said) == 8  # fmt: skip


@pytest.mark.parametrize("text", ["-1", "-.5", "-1e-3", "-1.5E+2"])
def test_a_negative_number_is_a_value_and_no_flag(text):
    assert overrides("--lr", text) == {"lr": text}


def test_the_places_of_the_help_are_no_flags():
    assert refused("--OPTION-OF-MEGATRON", "1")[0].startswith("unknown flag --OPTION-OF-MEGATRON")
    assert overrides("--sglang-OPTION", "1") == {"sglang": {"OPTION": 1}}, "the check refuses it"
